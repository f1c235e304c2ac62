"""The CPU is a platform like any other."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rlflow.utils import device
from rlflow.utils.errors import ConfigError


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv(device.DEVICE_ENV, "cpu")


def test_the_cpu_platform_answers_everything(on_cpu):
    assert device.get_device_name() == "cpu"
    assert device.get_nccl_backend() == "gloo"
    assert device.get_visible_devices_keyword() == ""
    assert device.get_resource_name() == "CPU"
    assert device.get_vendor() == "cpu"
    assert device.get_device_capability() == (None, None)
    assert not device.is_support_ipc()
    assert device.get_device() == torch.device("cpu")
    assert torch.ones(1).to(device.get_device_id()).device.type == "cpu"
    here = device.get_torch_device()
    here.set_device(0)
    here.synchronize()
    here.empty_cache()
    here.reset_peak_memory_stats()
    device.set_expandable_segments(True)
    assert here.device_count() == 1
    assert 0 < here.memory_allocated() <= here.max_memory_allocated() + 2**20
    free, total = here.mem_get_info()
    assert 0 < free <= total


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv(device.DEVICE_ENV, "cuda")
    assert device.get_nccl_backend() == "nccl"
    assert device.get_visible_devices_keyword() == "CUDA_VISIBLE_DEVICES"
    assert device.get_resource_name() == "GPU"
    assert device.get_torch_device() is torch.cuda
    monkeypatch.setenv(device.DEVICE_ENV, "abacus")
    with pytest.raises(ConfigError, match="'abacus' is not known"):
        device.get_device_name()


def test_names_for_another_device_need_no_torch():
    code = (
        "import sys; from rlflow.utils import device as d; "
        "assert d.get_resource_name('cuda') == 'GPU' and d.cpu_cores() >= 1 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_seeding_and_the_generator_state(on_cpu):
    here = device.get_torch_device()
    device.manual_seed(3)
    state = here.get_rng_state()
    first = torch.rand(2)
    here.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    device.manual_seed_all(3)
    assert torch.equal(torch.rand(2), first)


def test_a_registered_platform_is_preferred(monkeypatch):
    class Npu(device.Platform):
        device_name = "npu"

    monkeypatch.setattr(device.PlatformRegistry, "_platforms", dict(device.PlatformRegistry._platforms))
    monkeypatch.setattr(device, "_detected", None)
    monkeypatch.delenv(device.DEVICE_ENV, raising=False)
    assert not device.is_npu_available
    device.PlatformRegistry.register("npu", Npu())
    assert device.get_device_name() == "npu"
    assert device.is_npu_available
    config = SimpleNamespace(trainer=SimpleNamespace(device="cuda"))
    device.auto_set_device(config)
    assert config.trainer.device == "npu"


@pytest.mark.parametrize("wanted", ["cpu", "cuda"])
def test_a_machine_without_an_accelerator_changes_no_config(on_cpu, wanted):
    config = SimpleNamespace(trainer=SimpleNamespace(device=wanted))
    device.auto_set_device(config)
    assert config.trainer.device == wanted
