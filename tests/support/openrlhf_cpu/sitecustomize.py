"""Loaded by every Python of a test job, Ray's workers among them: OpenRLHF on a CPU."""

import os

if os.environ.get("OPENRLHF_TEST_STEM"):
    import stem

    stem.hand_over()  # does not come back where the stem runs this process's command

if os.environ.get("OPENRLHF_ON_CPU") == "1":
    import cpu_patches

    cpu_patches.install()


def install_asked_for():
    """Install what a job's own environment asks for; again in what the stem forks."""
    if prefix := os.environ.get("OPENRLHF_TEST_SHM"):
        cpu_patches.name_shared_memory(prefix)
    if {"OPENRLHF_TEST_RANK_BYTES", "OPENRLHF_TEST_PEAKS"} & set(os.environ):
        cpu_patches.install_memory()
    if {"OPENRLHF_TEST_FORCE", "OPENRLHF_TEST_LEAVE"} & set(os.environ):
        import forced

        forced.install()


install_asked_for()
