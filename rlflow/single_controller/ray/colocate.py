"""What a worker process will host: one class, or several under role names.

There is one way to share a process: `create_colocated_worker_cls({role: RayClassWithInitArgs(...)})`. All roles live
in one actor per bundle, and the group routes a call by (role, method); `group.spawn(roles)` gives one view per role.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlflow.single_controller.base.worker import Worker
from rlflow.single_controller.base.worker_group import ClassWithInitArgs
from rlflow.single_controller.ray.host import RoleHost
from rlflow.utils.device import get_resource_name
from rlflow.utils.errors import ContractError
from rlflow.utils.ray_utils import ray_get

_HOST = ray.remote(RoleHost)

COLOCATED_NAME = "WorkerDict"


def plain_class(cls: Any) -> type:
    """The class itself of what may be a `ray.remote` class."""
    metadata = getattr(cls, "__ray_metadata__", None)
    if metadata is None:
        return cls
    return getattr(metadata.modified_class, "__ray_actor_class__", metadata.modified_class)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its arguments; calling it starts a process for it.

    Args:
        cls: a `Worker` subclass, or `ray.remote` of one.
        args, kwargs: for its constructor.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(plain_class(cls), *args, **kwargs)
        if not (isinstance(self.cls, type) and issubclass(self.cls, Worker)):
            raise ContractError(f"{self.cls!r} must be a subclass of rlflow.single_controller.base.Worker")
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}

    @property
    def name(self) -> str:
        """Class name of the actors, for their names."""
        return self.cls.__name__

    @property
    def roles(self) -> dict[str, ClassWithInitArgs]:
        """What a process hosts, in the order of construction."""
        return {self.name: self}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Add Ray actor options (`runtime_env` and `env_vars` in it are merged, others replaced)."""
        merge_options(self._options, options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ray resources that each process takes beside its share of the bundle."""
        self._additional_resource.update(additional_resource)

    def __call__(
        self,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_idx: int = 0,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: Any = None,
        device_name: str = "cuda",
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Start an empty host process on a bundle, or (sharing_with) on the node and devices of another host.

        `options` are further Ray options; those of `update_options` win over them. The roles are not built yet; see
        `RoleHost`.
        """
        merged: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        if sharing_with is not None:
            place = ray_get(sharing_with.describe.remote(), what="the place of the worker to share a device with")
            merged["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place["node_id"], soft=False)
            if place["devices"] is not None:
                merged["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": place["devices"]}}
        elif placement_group is not None:
            merged["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placement_group, placement_group_bundle_index=placement_group_bundle_idx
            )
            if use_gpu and get_resource_name(device_name) == "GPU":
                merged["num_gpus"] = num_gpus
            elif use_gpu and device_name != "cpu":
                merged["resources"] = {get_resource_name(device_name): num_gpus}
        if self._additional_resource:
            merged["resources"] = {**merged.get("resources", {}), **self._additional_resource}
        merge_options(merged, options or {})
        merge_options(merged, self._options)
        return _HOST.options(**merged).remote()


def merge_options(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Add Ray options in place; environment variables are merged by name."""
    for key, value in new.items():
        if key == "runtime_env" and key in into:
            env = {**into[key].get("env_vars", {}), **value.get("env_vars", {})}
            into[key] = {**into[key], **value, **({"env_vars": env} if env else {})}
        else:
            into[key] = value


class ColocatedClassWithInitArgs(RayClassWithInitArgs):
    """Several roles for one process; made by `create_colocated_worker_cls`."""

    def __init__(self, roles: Mapping[str, RayClassWithInitArgs]) -> None:
        super().__init__(Worker)
        self._roles: dict[str, ClassWithInitArgs] = dict(roles)
        for role in roles.values():
            self.update_options(role._options)
            self.set_additional_resource(role._additional_resource)

    @property
    def name(self) -> str:
        return COLOCATED_NAME

    @property
    def roles(self) -> dict[str, ClassWithInitArgs]:
        return self._roles


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """What a process hosts when it hosts all these roles, built in the order of the dict.

    Raises:
        ContractError: no roles, or a name that cannot be an attribute.
    """
    if not class_dict:
        raise ContractError("no roles to colocate")
    bad = [role for role in class_dict if not role.isidentifier()]
    if bad:
        raise ContractError(f"role names {bad} must be identifiers")
    return ColocatedClassWithInitArgs(class_dict)
