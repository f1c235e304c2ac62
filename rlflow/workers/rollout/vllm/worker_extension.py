"""The part of a weight sync that runs inside vLLM's worker processes, beside the model.

    begin_receiving          nothing yet: the old weights still serve
    receive_bucket ...       from the first one the model is a mixture
    finish_receiving         packed for the kernels again; says what arrived and what did not
    stop_receiving           gives up: the modules are whole, their values are not

vLLM keeps matrices in the form its kernels want (on a CPU the parameter itself is empty), so tensors cannot be copied
into parameters. Its layer-wise reload takes them as a checkpoint has them: it buffers what belongs to a layer and packs
the layer once all of it is there. That may be many buckets later, when the sender has filled the memory anew, so every
tensor is copied out of its bucket first.

Invariants
    - No exception leaves a method: it would end vLLM's engine. Answers are plain values; `error` says what went wrong.
    - After an error the model has no half-built module, so that a later sync can repair the weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rlflow.checkpoint_engine.base import TensorMeta
from rlflow.checkpoint_engine.checksum import combine, tensor_digest
from rlflow.checkpoint_engine.shared_memory import open_bucket

logger = logging.getLogger(__name__)


def _answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(method)
    def call(self: WeightReceiver, *args: Any) -> dict[str, Any]:
        try:
            return method(self, *args)
        except Exception as error:  # noqa: BLE001 - see the module: it would end the engine
            logger.exception("%s failed", method.__name__)
            return {"error": f"{type(error).__name__}: {error}"}

    return call


class WeightReceiver:
    """Mixed into vLLM's worker (`worker_extension_cls`); its methods are called by `collective_rpc`.

    The names of its methods and attributes must not be among the worker's own.
    """

    model_runner: Any
    vllm_config: Any
    _rlflow_digests: dict[str, int] | None = None
    _rlflow_loaded: set[str]
    _rlflow_shared: dict[str, set[str]]

    @_answers
    def rlflow_facts(self) -> dict[str, Any]:
        """This worker: {"pid", "threads", "cores"}."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return {"pid": os.getpid(), "threads": torch.get_num_threads(), "cores": cores}

    @_answers
    def begin_receiving(self) -> dict[str, Any]:
        """Make the model ready to take a checkpoint's tensors in any order and any number of calls."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        self._rlflow_shared = shared_parameters(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        self._rlflow_digests, self._rlflow_loaded = {}, set()
        return {}

    @_answers
    def receive_bucket(self, metas: list[dict[str, Any]], path: str) -> dict[str, Any]:
        """Load the tensors of a bucket in the sender's memory. Each meta: the fields of a `TensorMeta`."""
        tensors = [TensorMeta(**{**meta, "shape": tuple(meta["shape"])}) for meta in metas]
        with open_bucket(path, tensors) as views:
            copies = []
            while views:  # views must not outlive the block
                name, view = views.pop(0)
                copies.append((name, view.clone()))
                del view
        self._rlflow_load(copies)
        return {"bytes": sum(meta.size for meta in tensors)}

    def _rlflow_load(self, tensors: list[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        if self._rlflow_digests is None:
            raise RuntimeError("begin_receiving comes first")
        now = ""

        def each() -> Any:
            nonlocal now
            for name, tensor in tensors:
                now = name
                self._rlflow_digests[name] = tensor_digest(name, tensor)  # type: ignore[index]
                yield name, tensor

        try:
            with set_current_vllm_config(self.vllm_config):
                loaded = self.model_runner.get_model().load_weights(each())
        except Exception as error:
            raise ValueError(f"tensor {now!r}: {error or type(error).__name__}") from error
        self._rlflow_loaded |= set(loaded or ())

    @_answers
    def finish_receiving(self) -> dict[str, Any]:
        """Pack what is not packed yet. {"names", "checksum", "missing"}: sent names, and parameters without values."""
        model, digests = self.model_runner.get_model(), self._rlflow_digests
        if digests is None:
            return {"names": [], "checksum": 0, "missing": sorted(name for name, _ in model.named_parameters())}
        missing = missing_tensors(model, set(digests), self._rlflow_loaded, self._rlflow_shared)
        if missing:
            self._rlflow_drop()
        self._rlflow_finalize(model)
        return {"names": sorted(digests), "checksum": combine(list(digests.values())), "missing": missing}

    @_answers
    def stop_receiving(self) -> dict[str, Any]:
        """End a sync that failed: layers that were not complete keep their old values, the others have new ones."""
        if self._rlflow_digests is not None:
            self._rlflow_drop()
            self._rlflow_finalize(self.model_runner.get_model())
        return {}

    def _rlflow_drop(self) -> None:
        """Forget what is buffered for layers that are not complete."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model_runner.get_model().modules():
            info = get_layerwise_info(layer)
            info.loaded_weights, info.load_numel = [], 0

    def _rlflow_finalize(self, model: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
            # vLLM packs a layer when its own weights come. A head that shares those of the embedding gets none, and
            # would go on computing with the packed copy of the old ones.
            for name, others in self._rlflow_shared.items():
                if name not in self._rlflow_loaded and others & self._rlflow_loaded:
                    layer = model.get_submodule(name.rpartition(".")[0])
                    layer.quant_method.process_weights_after_loading(layer)
        self._rlflow_digests = None
        for forget in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(self.model_runner, forget)()


def shared_parameters(model: Any) -> dict[str, set[str]]:
    """Name of each parameter that the model has under several names -> the other names."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    return {name: group - {name} for group in names.values() if len(group) > 1 for name in group}


def missing_tensors(model: Any, sent: set[str], loaded: set[str], shared: dict[str, set[str]]) -> list[str]:
    """Parameters (or the parts they are packed from) that got no values since `begin_receiving`.

    Args:
        sent: names of the tensors that came, as a checkpoint has them.
        loaded: names of the model's parameters that `load_weights` said it filled. A packed parameter is in it as soon
            as one of its parts came.
        shared: other names of parameters; one that came under another name is there.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    missing = []
    for name, _ in model.named_parameters():
        plain = name.replace(".base_layer.", ".")  # vLLM's wrapper of a layer that may have an adapter
        parts = _parts(plain, packed)
        # Only a model whose checkpoint has the parts under these names can be asked for each of them.
        if len(parts) > 1 and any(part in sent for part in parts):
            missing += [part for part in parts if part not in sent]
        elif not loaded & {plain, name, *shared.get(name, ())}:
            missing += parts
    return sorted(missing)


def _parts(name: str, packed: dict[str, list[str]]) -> list[str]:
    """`a.qkv_proj.weight` -> `a.q_proj.weight`, ...; a name without packed parts is its own only part."""
    pieces = name.split(".")
    for number, piece in enumerate(pieces):
        if len(packed.get(piece, ())) > 1:
            return [".".join([*pieces[:number], part, *pieces[number + 1 :]]) for part in packed[piece]]
    return [name]
