"""What each rollout engine can do: the one table that checks, clients, replicas and the documentation read.

    CAPABILITIES["hf"].priority                 one fact
    check_request(engine, params, options)      refuses a request that the engine would ignore or not understand
    register_engine(EngineCapabilities(...))    for an engine of your own, beside `RolloutReplicaRegistry.register`

A fact is stated for the adapter in this repository, not for what the engine could do with another one. The module
imports nothing but errors, so that a configuration can be checked before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlflow.utils.errors import ConfigError

# Sampling parameters that every engine reads; `max_new_tokens` is another name of `max_tokens`.
COMMON_SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "logprobs",
        "max_tokens",
        "max_new_tokens",
        "stop_token_ids",
        "seed",
        "ignore_eos",
    }
)
ALL_DEVICES = ("cpu", "cuda")
MEDIA = ("image_data", "video_data", "audio_data", "mm_processor_kwargs")


@dataclass(frozen=True)
class EngineCapabilities:
    """One engine's row.

    Fields:
        name: value of `rollout.name`.
        title: for people.
        packages: distributions that must be importable; one of them is enough. Empty: always there.
        extra: what to install when they are not (`pip install 'rlflow[EXTRA]'`).
        devices: values of `trainer.device` it runs on.
        tensor_parallel, data_parallel, pipeline_parallel, expert_parallel: parallel sizes above 1.
        several_nodes: a replica may span nodes.
        lora_adapters: serves an adapter beside the base weights (`begin_update` takes `lora`); else adapters are merged
            before they are sent.
        sleep_frees_memory: devices on which `sleep` gives memory back; elsewhere it only stops serving.
        prefix_cache: keeps keys and values of ended requests for later ones of the same weights.
        priority: `priority` of a request changes the order of service.
        prompt_logprobs: log-probs of prompt tokens in a `generate` call.
        full_determinism: the same command twice gives the same bits.
        hashable_parameters: devices on which the parameters can be read back and hashed after a sync; elsewhere a
            canary prompt is the proof.
        parameters_by_name: tensors are filled one by one; else all layers are reloaded in one call.
        logprobs_modes: values of `rollout.logprobs_mode`; the first is the default. "processed": of the distribution
            that was sampled from, "raw": of the model's own.
        load_formats: values of `rollout.load_format`.
        sampling: sampling parameters it understands.
        media: inputs beside tokens.
        http: has an OpenAI-compatible endpoint.
    """

    name: str
    title: str
    packages: tuple[str, ...] = ()
    extra: str = ""
    devices: tuple[str, ...] = ALL_DEVICES
    tensor_parallel: bool = False
    data_parallel: bool = False
    pipeline_parallel: bool = False
    expert_parallel: bool = False
    several_nodes: bool = False
    lora_adapters: bool = False
    sleep_frees_memory: tuple[str, ...] = ()
    prefix_cache: bool = False
    priority: bool = False
    prompt_logprobs: bool = False
    full_determinism: bool = False
    hashable_parameters: tuple[str, ...] = ()
    parameters_by_name: tuple[str, ...] = ALL_DEVICES
    logprobs_modes: tuple[str, ...] = ("processed_logprobs",)
    load_formats: tuple[str, ...] = ("dummy", "auto", "safetensors")
    sampling: frozenset[str] = COMMON_SAMPLING
    media: tuple[str, ...] = ()
    http: bool = False


CAPABILITIES: dict[str, EngineCapabilities] = {
    row.name: row
    for row in (
        EngineCapabilities(
            name="hf",
            title="embedded engine",
            lora_adapters=True,
            sleep_frees_memory=ALL_DEVICES,
            full_determinism=True,
            hashable_parameters=ALL_DEVICES,
        ),
        EngineCapabilities(
            name="vllm",
            title="vLLM",
            packages=("vllm",),
            extra="vllm",
            tensor_parallel=True,
            data_parallel=True,
            pipeline_parallel=True,
            sleep_frees_memory=("cuda",),
            prefix_cache=True,
            priority=True,
            parameters_by_name=(),
            logprobs_modes=("processed_logprobs", "raw_logprobs"),
            sampling=COMMON_SAMPLING | {"min_p", "min_tokens", "presence_penalty", "frequency_penalty", "logit_bias"},
        ),
        EngineCapabilities(
            name="sglang",
            title="SGLang",
            packages=("sglang",),
            extra="sglang",
            tensor_parallel=True,
            sleep_frees_memory=("cuda",),
            prefix_cache=True,
            hashable_parameters=ALL_DEVICES,
            logprobs_modes=("processed_logprobs", "raw_logprobs"),
        ),
    )
}


def register_engine(row: EngineCapabilities) -> None:
    """Add (or replace) the row of an engine."""
    CAPABILITIES[row.name] = row


def capabilities_of(name: str) -> EngineCapabilities:
    """The row of an engine; one that nobody described is taken to read the common parameters and nothing else."""
    return CAPABILITIES.get(name) or EngineCapabilities(name=name, title=name)


def check_request(name: str, params: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> None:
    """Refuse what the engine would ignore.

    Args:
        name: the engine, `rollout.name`.
        params: sampling parameters of the request; None values count as absent.
        options: further arguments of `generate` (media, `priority`); empty ones count as absent.

    Raises:
        ConfigError: names engine, parameter, value, and the engines that can.
    """
    row = capabilities_of(name)
    given = [("sampling_params", key, value, key in row.sampling) for key, value in params.items() if value is not None]
    for key, value in (options or {}).items():
        if key in MEDIA and value:
            given.append(("generate", key, "(data)", key in row.media))
        elif key == "priority" and value:
            given.append(("generate", key, value, row.priority))
    for where, key, value, known in given:
        if not known:
            others = [other.name for other in CAPABILITIES.values() if other.name != name and _takes(other, key)]
            instead = f"Use rollout.name={' or '.join(others)}, or leave it out" if others else "Leave it out"
            raise ConfigError(
                f"The rollout engine {name} cannot use {key}={value!r} ({where}). {instead}. It knows: "
                f"{', '.join(sorted(row.sampling))}."
            )


def _takes(row: EngineCapabilities, key: str) -> bool:
    return key in row.sampling or key in row.media or (key == "priority" and row.priority)


def markdown_rows() -> tuple[tuple[str, ...], list[list[str]]]:
    """(header, rows) of the table in the documentation: one line a fact, one column an engine."""
    engines = list(CAPABILITIES.values())
    header = ("", *(row.title for row in engines))
    lines = []
    for field in fields(EngineCapabilities):
        if field.name in ("title", "packages"):
            continue
        label = "`rollout.name`" if field.name == "name" else field.name.replace("_", " ")
        lines.append([label, *(_cell(field.name, getattr(row, field.name)) for row in engines)])
    return header, lines


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "sampling":
        more = sorted(value - COMMON_SAMPLING)
        return "common" + (f", {', '.join(more)}" if more else "")
    if isinstance(value, tuple):
        return ", ".join(value) or "no"
    return f"`{value}`" if value else "-"
