"""Engines of verl's in processes of their own, without Ray: one after the other in one world.

``python -m verl_cpu.engines FOLDER RANK WORLD``: runs each of ``FOLDER/cases.json`` (a list of
`Case`s) and writes what came of it to ``FOLDER/NAME.pt`` on rank 0.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_cpu.command import environment

PROMPTS = 8
STEPS = 2
RATE = 1e-3
"""Of learning."""


@dataclass(frozen=True)
class Case:
    """One engine: trained for two steps on a batch that does not depend on the layout."""

    name: str
    model: str
    """Folder of the model."""
    degree: int = 1
    """Ranks that hold one copy."""
    stages: int = 1
    """Of a pipeline, among which they hold it."""
    vendor: str | None = "nereus"
    """None for verl's own engine."""
    kind: str = "language_model"
    dtype: str = "fp32"
    packed: bool = False
    """Whether sequences are, without padding."""
    dynamic: bool = False
    """Whether micro-batches are cut by tokens."""
    poisoned: bool = False
    """Whether a gradient of rank 0 is infinite in a third step."""
    saves: str = ""
    """Folder of the checkpoint after two steps."""
    reads: str = ""
    """Folder of a checkpoint of as many ranks, which is read in place of training."""


def run_cases(folder: Path, cases: list[Case], world: int, timeout_s: float) -> None:
    """Run cases on ranks 0 to ``world``; raises RuntimeError with the log of one that failed."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    env = environment(folder, VERL_USE_EXTERNAL_MODULES="verl_cpu.platform")
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "verl_cpu.engines", str(folder), str(rank), str(world)]
            with log.open("w") as file:
                ranks.append(
                    subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
                )
        end_s = time.monotonic() + timeout_s
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > end_s:
                break
            time.sleep(0.1)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait(60)
    for rank, log in zip(ranks, logs, strict=True):
        if rank.returncode not in (0, -9):
            raise RuntimeError(
                f"{log.name} ended with {rank.returncode}: {log.read_text()[-4000:]}"
            )
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"ranks did not end in {timeout_s} s: {logs[0].read_text()[-4000:]}")


def main(folder: Path, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for fields in json.loads((folder / "cases.json").read_text()):
        case = Case(**fields)
        found = outcome(case)
        if rank == 0:
            torch.save(found, folder / f"{case.name}.pt")
        dist.barrier()
    dist.destroy_process_group()


def outcome(case: Case) -> dict:
    """Build the engine and return its figures before and after two steps."""
    import torch

    from nereus_adapters.verl.facts import cut_elements

    try:
        engine = built(case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if case.reads:
        from nereus_adapters.verl.resuming import fill_engine

        fill_engine(engine, "actor", Path(case.reads), torch.distributed.get_world_size())
        return {"outputs": inferred(engine, case), "moments": moments_of(engine)}
    found = {"outputs": inferred(engine, case), "losses": [], "grad_norms": []}
    for step in range(STEPS):
        with engine.train_mode():
            trained = engine.train_batch(batch(engine, case, step), loss_function=loss_of(case))
        told = gathered((sum(trained["loss"]), trained["metrics"].get("grad_norm")))
        sources = gathered(engine.is_mp_src_rank_with_outputs())
        told = [values for values, is_source in zip(told, sources, strict=True) if is_source]
        assert len(told) == engine.get_data_parallel_size()
        found["losses"].append(sum(loss for loss, _ in told) / len(told))
        (norm,) = {norm for _, norm in told}
        found["grad_norms"].append(norm)
        engine.lr_scheduler_step()
    found["after"] = inferred(engine, case)
    found["weights"] = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    found["moments"] = moments_of(engine)
    if case.poisoned:
        found["poisoned"] = gathered(poisoned(engine, case))
    if case.saves:
        engine.save_checkpoint(case.saves, global_step=STEPS)
    found["facts"] = dict(cut_elements(engine))
    local = [p.to_local() if hasattr(p, "to_local") else p for p in engine.module.parameters()]
    found["elements"] = gathered(sum(tensor.numel() for tensor in local))
    assert all(torch.isfinite(tensor).all() for tensor in found["weights"].values())
    return found


def poisoned(engine, case):
    """Step with an infinite gradient on rank 0; returns its norm, and if all is as it was."""
    import torch

    def state():
        held = engine.optimizer.state
        named = engine.module.named_parameters()
        return {n: (whole(p).clone(), whole(held[p]["exp_avg"]).clone()) for n, p in named}

    before = state()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(engine, case), loss_of(case))
        if engine.rank == 0:
            gradient = next(engine.module.parameters()).grad
            getattr(gradient, "to_local", lambda: gradient)().view(-1)[0] = torch.inf
        norm = engine.optimizer_step()
    after = state()
    same = all(torch.equal(a, b) for n in before for a, b in zip(before[n], after[n], strict=True))
    return norm, same


def moments_of(engine):
    """Return second moments by name, of all stages."""
    mine = {
        name: whole(engine.optimizer.state[parameter]["exp_avg_sq"])
        for name, parameter in engine.module.named_parameters()
    }
    return {name: tensor for stage in gathered(mine) for name, tensor in stage.items()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def built(case: Case):
    os.environ["VERL_ENGINE_VENDOR"] = case.vendor or "nvidia"
    if case.vendor is not None:
        from nereus_adapters.verl.tensor_parallel import register

        register()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    model = HFModelConfig(
        path=case.model,
        model_type=case.kind,
        load_tokenizer=False,
        use_remove_padding=case.packed,
        enable_gradient_checkpointing=case.kind == "value_model",
        override_config={"attn_implementation": "varlen_cpu" if case.packed else "sdpa"},
    )
    precision = {"param_dtype": case.dtype, "reduce_dtype": "fp32"}
    config = FSDPEngineConfig(
        strategy="fsdp2",
        fsdp_size=case.degree,
        mixed_precision=precision,
        use_torch_compile=False,
    )
    role = "critic" if case.kind == "value_model" else "actor"
    os.environ["NEREUS_PIPELINE_STAGES"] = json.dumps({role: case.stages})
    engine = EngineRegistry.new(
        model_type=case.kind,
        backend="fsdp2",
        model_config=model,
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(
            lr=RATE, total_training_steps=10, clip_grad=1e-3, weight_decay=0.01
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def batch(engine, case, step=0):
    """Return this rank's part of the batch of a step."""
    import torch
    from verl.utils import tensordict_utils as tu

    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(5, 12, (PROMPTS,), generator=draw).tolist()
    vocabulary = engine.model_config.hf_config.vocab_size
    tokens = [torch.randint(0, vocabulary, (n,), generator=draw) for n in lengths]
    size, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    mine = tokens[rank * PROMPTS // size : (rank + 1) * PROMPTS // size]

    def nested(rows):
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    return tu.get_tensordict(
        {
            "input_ids": nested(mine),
            "position_ids": nested([torch.arange(len(row)) for row in mine]),
            "loss_mask": nested([torch.ones(len(row)) for row in mine]),
        },
        {
            "use_dynamic_bsz": case.dynamic,
            "max_token_len_per_gpu": 24,
            "micro_batch_size_per_gpu": 2,
            "use_remove_padding": case.packed,
            "use_fused_kernels": False,
            "temperature": 1.0,
            "calculate_entropy": False,
            "pad_token_id": 0,
            "global_batch_size": PROMPTS,
        },
    )


def loss_of(case: Case):
    """Return a mean over all tokens of the batch, whatever ranks hold them."""

    def loss(model_output, data, dp_group=None):
        key = "values" if case.kind == "value_model" else "log_probs"
        values = model_output[key].values()
        total = (values * values).sum() if key == "values" else -values.sum()
        return total * data["dp_size"] / data["batch_num_tokens"], {}

    return loss


def inferred(engine, case):
    """Return outputs of the batch of step 0 in the order of prompts."""
    import torch

    with engine.eval_mode():
        found = engine.infer_batch(batch(engine, case))["model_output"]
    key = "values" if case.kind == "value_model" else "log_probs"
    mine = found[key].values().detach().tolist() if found else None  # of the last stage
    assert found or not engine.is_mp_src_rank_with_outputs()
    rows = gathered((engine.get_data_parallel_rank(), mine))
    rows = [(rank, values) for rank, values in rows if values is not None]
    by_rank = dict(rows)
    assert all(by_rank[rank] == values for rank, values in rows), "ranks of a unit disagree"
    return torch.tensor([value for rank in sorted(by_rank) for value in by_rank[rank]])


def gathered(mine):
    """Return what every rank has, by rank."""
    import torch.distributed as dist

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
