"""A reward that a tiny model can raise: the part of a response that is digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    digits = sum(c.isdigit() for c in solution_str)
    return digits / max(1, len(solution_str)) + (ground_truth in solution_str)
