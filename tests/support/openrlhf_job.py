"""A tiny model, its data, and real `train_ppo_ray` jobs on this machine's CPU."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUPPORT = Path(__file__).parent
REWARD = '''
import torch


def reward_func(queries, prompts, labels):
    """Reward the part of a response that is digits: dense, so that advantages are not zero."""
    found = []
    for query, prompt in zip(queries, prompts):
        text = query[len(prompt):]
        found.append(sum(c.isdigit() for c in text) / max(1, len(text)))
    rewards = torch.tensor(found)
    return {"rewards": rewards[0].item(), "scores": rewards[0].item(), "extra_logs": {}}
'''


AGENT = """
from copy import deepcopy

from openrlhf.utils.agent import SingleTurnAgentExecutor

ASKED, EACH, LENGTHS = {asked!r}, {each}, {lengths}


class AgentExecutor(SingleTurnAgentExecutor):
    \"\"\"Gives responses a length that grows, as of a model that learns to think.\"\"\"

    def __init__(self):
        super().__init__({reward!r})

    async def execute(self, prompt, label, sampling_params, *args, **kwargs):
        with open(ASKED, "ab", buffering=0) as asked:  # appended to by every engine
            asked.write(b".")
            number = asked.tell() - 1
        length = LENGTHS[min(number // EACH, len(LENGTHS) - 1)]
        own = deepcopy(sampling_params)
        own.max_tokens = own.min_tokens = length
        own.ignore_eos = True
        return await super().execute(prompt, label, own, *args, **kwargs)
"""


_NODE = """
import os, subprocess, threading, time
from ray._private.worker import global_worker
ray_command = os.path.join(os.path.dirname(sys.executable), "ray")

def start_node():
    subprocess.Popen(
        [ray_command, "start", "--block", "--node-ip-address=127.0.0.2", "--num-cpus=2",
         "--num-gpus=2", f"--address={global_worker.gcs_client.address}",
         f"--object-store-memory={80 * 2**20}", "--min-worker-port=0", "--max-worker-port=0",
         "--disable-usage-stats"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
"""
SECOND_NODE = f"""{_NODE}
start_node()
deadline_s = time.monotonic() + 60
while sum(node["Alive"] for node in ray.nodes()) < 2:
    assert time.monotonic() < deadline_s, "no second node of Ray after 60 s"
    time.sleep(0.1)
"""
"""Runs in the driver of a job: two more logical GPUs, on a Ray node of its own on this machine.

Its CPUs are those of a group or of engines: the trainer finds none there and stays on the other."""
LATE_NODE = f"""{_NODE}
def start_when_asked():
    while not os.path.exists("node-is-to-come"):
        time.sleep(0.1)
    start_node()

threading.Thread(target=start_when_asked, daemon=True).start()
"""
"""The same, once there is a file ``node-is-to-come`` in the folder of the job."""


RECORDED = """
import random

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    \"\"\"Answers with recorded responses, so that jobs to be compared train on the same data.\"\"\"

    def __init__(self):
        self.asked = {{}}

    async def execute(self, prompt, label, hf_tokenizer, **more):
        number = self.asked[prompt] = self.asked.get(prompt, 0) + 1
        recorded = random.Random(f"{{prompt}} {{number % {samples}}}")
        response = [recorded.randrange(2, 512) for _ in range(16)]
        tokens = hf_tokenizer(text=prompt, add_special_tokens=False)["input_ids"]
        reward = sum(token % 2 for token in response) / len(response)
        return dict(
            prompt=prompt, label=label, images=None, mm_train_inputs=None,
            reward=reward, scores=reward,
            observation_tokens=tokens + response,
            action_ranges=[(len(tokens), len(tokens) + len(response))],
            rollout_log_probs=None, truncated=False, extra_logs={{}},
        )
"""


def make_recorded(folder: Path, samples: int) -> Path:
    """Write the code of a user whose responses are the same in every job, ``samples`` a prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recorded.py"
    path.write_text(RECORDED.format(samples=samples), encoding="utf-8")
    return path


def make_agent(folder: Path, assets: Path, lengths: Sequence[int], each: int) -> Path:
    """Write the code of a user whose responses have these lengths, for ``each`` samples in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    path, asked = folder / "agent.py", str(folder / "asked")
    reward = str(assets / "reward.py")
    text = AGENT.format(asked=asked, each=each, lengths=tuple(lengths), reward=reward)
    path.write_text(text, encoding="utf-8")
    return path


def make_assets(
    folder: Path,
    prompts: int = 64,
    *,
    hidden: int = 128,
    intermediate: int = 256,
    layers: int = 2,
    heads: int = 4,
) -> Path:
    """Write a 2-layer Qwen2, a judge of that shape, a byte-level tokenizer, prompts, a reward."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sums = [
        f"Question: what is {a} plus {b}? Answer: {a + b}." for a in range(40) for b in range(40)
    ]
    tokenizer.train_from_iterator(
        sums,
        trainers.BpeTrainer(
            vocab_size=510,
            show_progress=False,  # it would go to where a benchmark writes its figures
            special_tokens=["<|pad|>", "<|eos|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>"
    ).save_pretrained(model)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        use_sliding_window=False,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    judge = Qwen2ForSequenceClassification(Qwen2Config(**(config.to_dict() | {"num_labels": 1})))
    judge.to(torch.bfloat16).save_pretrained(folder / "judge")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>"
    ).save_pretrained(folder / "judge")
    rng = random.Random(0)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as lines:
        for _ in range(prompts):
            a, b = rng.randrange(40), rng.randrange(40)
            prompt = f"Question: what is {a} plus {b}? Answer:"
            lines.write(json.dumps({"prompt": prompt, "label": str(a + b)}) + "\n")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return folder


def flags(assets: Path, out: Path, **changes: object) -> list[str]:
    """OpenRLHF's flags of a tiny GRPO job: 2 engines, 1 actor, 1 reference, 2 steps.

    ``changes``: ``__`` stands for a dot; True is a bare flag, None or False leaves a flag out.
    """
    values: dict[str, object] = {
        "actor.model_name_or_path": assets / "model",
        "reward.remote_url": assets / "reward.py",
        "data.prompt_dataset": assets / "prompts.jsonl",
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.max_len": 64,
        "data.max_samples": 16,
        "rollout.max_new_tokens": 16,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 2,
        "rollout.micro_batch_size": 4,
        "train.batch_size": 16,
        "train.micro_batch_size": 4,
        "train.num_episodes": 1,
        "train.max_epochs": 1,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "vllm.enforce_eager": True,
        "vllm.sync_backend": "gloo",
        "vllm.gpu_memory_utilization": 0.05,
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 1,
        "ref.num_nodes": 1,
        "ref.num_gpus_per_node": 1,
        "ds.zero_stage": 2,
        "ds.attn_implementation": "eager",
        "ds.param_dtype": "bf16",
        "algo.advantage.estimator": "group_norm",
        "algo.advantage.is_correction_level": "token",
        "algo.kl.init_coef": 0.01,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        "actor.adam.lr": 1e-3,
        "ckpt.output_dir": out / "final",
        "ckpt.path": out / "ckpt",
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    words: list[str] = []
    for key, value in values.items():
        if value is None or value is False:
            continue
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return words


@dataclass(frozen=True, slots=True)
class Ran:
    """A job that ended."""

    code: int
    output: str
    """Of the driver; what Ray's workers wrote last may be missing there."""
    wall_s: float
    trainer: str = ""
    """What the process of the trainer wrote."""

    def steps(self) -> list[dict[str, float]]:
        """Logged figures of every RL step."""
        found = []
        for line in self.trainer.splitlines():
            match = re.search(r"Global step (\d+): (\{.*\})", line)
            if match:
                pairs = re.findall(r"'([\w/]+)': (-?[\d.]+(?:e-?\d+)?)", match[2])
                found.append({"step": float(match[1])} | {k: float(v) for k, v in pairs})
        return found


def environment(folder: Path, gpus: int) -> dict[str, str]:
    """Environment of a job: CPU stand-ins, a private Ray with logical GPUs."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")}
    path = [str(SUPPORT / "openrlhf_cpu"), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "OPENRLHF_ON_CPU": "1",
        "OPENRLHF_TEST_GPUS": str(gpus),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "TOKENIZERS_PARALLELISM": "true",
    }


def die_with_parent() -> None:
    """Ask the kernel to end the driver, and with it its Ray, when this process is killed."""
    set_pdeathsig = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_pdeathsig, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return so many different ports of the loopback that nobody listens on now.

    They lie below those that the kernel gives to whoever connects: nobody takes one by chance.
    """
    connecting = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with contextlib.ExitStack() as held:  # until all are chosen
        while len(found) < count:
            one = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", secrets.choice(range(10_000, connecting))))
                found.append(int(one.getsockname()[1]))
    return found


def run(
    words: list[str],
    folder: Path,
    *,
    gpus: int = 8,
    timeout_s: float = 300.0,
    code: str = "",
    more: dict[str, str] | None = None,
    module: str = "nereus_plugins.openrlhf",
) -> Ran:
    """Run a module with flags in a process group of its own, under a Ray of its own.

    Args:
        words: Its command line.
        folder: For its output and caches.
        gpus: Logical GPUs of the Ray.
        timeout_s: After which it is killed; the code is then that of the signal.
        code: Python that runs in the driver first.
        more: Environment variables of the job and of Ray's workers.
        module: What to run.
    """
    import time

    folder.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix="orl")  # Ray's sockets need a short path
    shared = f"orl{secrets.token_hex(3)}"
    driver = folder / "driver.py"
    driver.write_text(
        "import runpy, sys, ray\n"
        f"ray.init(address='local', num_cpus=16, num_gpus={gpus}, include_dashboard=False,\n"
        f"    object_store_memory=300 * 2**20, _temp_dir={temporary!r})\n"
        f"{code}\n"
        f"sys.argv = [{module!r}, *sys.argv[1:]]\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    ray.shutdown()\n",
        encoding="utf-8",
    )
    start_s = time.monotonic()
    with (folder / "output.log").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, str(driver), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(folder, gpus) | {"OPENRLHF_TEST_SHM": shared} | (more or {}),
            cwd=folder,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            code_ = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code_ = -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            logs = [_text(p) for p in Path(temporary).glob("session_latest/logs/worker-*")]
            shutil.rmtree(temporary, ignore_errors=True)
            for left in Path("/dev/shm").glob(f"{shared}*"):  # of engines that Ray killed
                left.unlink(missing_ok=True)
    trainer = "".join(log for log in logs if "Global step" in log)
    (folder / "trainer.log").write_text(trainer, encoding="utf-8")
    return Ran(code_, _text(folder / "output.log"), time.monotonic() - start_s, trainer)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def stem(folder: Path, start_s: float = 240.0) -> Iterator[None]:
    """Let jobs' processes be forked from one that has imported everything (openrlhf_cpu/stem.py).

    Raises:
        RuntimeError: its imports failed, or took longer than ``start_s``.
    """
    short = Path(tempfile.mkdtemp(prefix="orl"))  # a socket needs a short path
    address, log = short / "stem", folder / "stem.log"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "openrlhf_cpu" / "stem.py"), str(address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(folder, 8),
            preexec_fn=die_with_parent,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told = select.select([process.stdout], [], [], start_s)[0]
        if not told or process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"no stem after {start_s:.0f} s: {log.read_text()[-3000:]}")
        os.environ["OPENRLHF_TEST_STEM"] = str(address)
        yield
    finally:
        os.environ.pop("OPENRLHF_TEST_STEM", None)
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        shutil.rmtree(short, ignore_errors=True)


if __name__ == "__main__":
    make_assets(Path(sys.argv[1]))
