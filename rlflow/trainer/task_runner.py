"""The controller process: one Ray actor that owns the TransferQueue and drives the trainer.

It holds no model. Whatever happens, journal and trackers are finished with an exit code, once, and the TransferQueue
is closed.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import uuid
from typing import Any

from rlflow.observe.feed import EventFeed, install_feed
from rlflow.trainer.watchdog import Watchdog
from rlflow.transfer_queue.settings import NAMESPACE_ENV
from rlflow.utils.import_utils import import_external_libs, load_class_from_fqn
from rlflow.utils.redact import protect_process, redact_text

logger = logging.getLogger(__name__)

STALL_MARGIN_S = 120.0


class TaskRunner:
    """Builds the trainer named by `trainer.v1.trainer_mode` and runs it to the end.

    `run` occupies one thread of the actor; `events` and `stop` answer the launcher from others (max_concurrency > 1).
    """

    def __init__(self) -> None:
        self.config: Any = None
        self.trainer: Any = None
        self.agent_loop_manager: Any = None
        self.feed = EventFeed()
        self._ending = threading.Lock()
        self._ended = False

    def events(self, after: int, timeout_s: float) -> tuple[int, list[dict[str, Any]]]:
        """Events for the user's terminal; see `EventFeed.after`."""
        return self.feed.after(after, timeout_s)

    def stop(self, reason: str, exit_code: int) -> None:
        """Close journal and trackers now, while `run` goes on: the launcher is about to end this process."""
        self._finish(exit_code, reason)

    def run(self, config: Any) -> dict[str, Any]:
        """Train. Returns `{"global_steps": ...}`; raises what stopped the run."""
        from omegaconf import OmegaConf, open_dict

        import rlflow.transfer_queue as tq
        from rlflow.trainer.ppo.trainer_base import get_trainer_cls

        configure_logging()
        protect_process(config)
        install_feed(self.feed)
        import_external_libs(config.actor_rollout_ref.model.external_lib)
        trainer_cls = get_trainer_cls(config.trainer.v1.trainer_mode)
        with open_dict(config):
            config.transfer_queue.enable = True
            config.transfer_queue.namespace = config.transfer_queue.get("namespace") or own_namespace()
        logger.debug("configuration:\n%s", OmegaConf.to_yaml(config))
        OmegaConf.resolve(config)
        self.config = config
        self.feed.publish({"type": "controller", "pid": os.getpid(), "host": platform.node()})
        tq.init(config.transfer_queue)
        watchdog = Watchdog(
            threading.get_ident(),
            # Every wait inside a stage ends before, with a better message.
            max(config.trainer.call_timeout_s, config.trainer.stall_timeout_s) + STALL_MARGIN_S,
            lambda: (self.feed.published, getattr(self.trainer, "global_steps", 0)),
            self._stalled,
        )
        exit_code, reason = 1, "ended early"
        try:
            self.trainer = trainer_cls(config=config)
            self.trainer.on_progress = self._progress
            self.trainer.init()
            self.init_agent_loop_manager()
            self.trainer.fit(self.agent_loop_manager)
            exit_code, reason = 0, "done"
            return {"global_steps": self.trainer.global_steps}
        except BaseException as error:
            reason = redact_text(f"{type(error).__name__}: {error}")
            self._fault(type(error).__name__, redact_text(str(error)))
            raise
        finally:
            watchdog.stop()
            try:
                self._finish(exit_code, reason)
                self._draw()
            finally:
                self._shutdown()
                tq.close()
                self.feed.close()
                install_feed(None)  # nobody reads it any more: later notices go to the log

    def _finish(self, exit_code: int, reason: str) -> None:
        """Close the records of the run; the first caller's exit code and reason count."""
        with self._ending:
            first, self._ended = not self._ended, True
        if first and self.trainer is not None:
            self.trainer.close(exit_code, reason)

    def _fault(self, what: str, text: str) -> None:
        """Note in the journal what is about to end the run."""
        with self._ending:
            if self.trainer is not None and not self._ended:
                self.trainer.recorder.event("fault", self.trainer.global_steps, what=what, text=text)

    def _draw(self) -> None:
        if self.trainer is not None and self.config.trainer.plots:
            from rlflow.observe.plots import write_plots

            write_plots(self.trainer.recorder.folder)

    def init_agent_loop_manager(self) -> None:
        """The built-in manager, or the class named by `rollout.agent.agent_loop_manager_class`."""
        from rlflow.agent_loop import AgentLoopManagerTQ

        fqn = self.config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
        manager_cls: Any = load_class_from_fqn(fqn, "agent_loop_manager_class") if fqn else AgentLoopManagerTQ
        self.agent_loop_manager = manager_cls.create(
            config=self.config,
            llm_client=self.trainer.get_llm_client(),
            teacher_client=self.trainer.get_teacher_client(),
            reward_loop_worker_handles=self.trainer.get_reward_handles(),
        )

    def _stalled(self, report: str) -> None:
        """Tell the launcher, which ends the run; then what is left of the records."""
        self.feed.publish({"type": "stalled", "text": report})
        logger.error("%s", report)
        self._fault("stall", report)
        self._finish(1, report)

    def _progress(self, done: int, total: int) -> None:
        text = f"step {self.trainer.global_steps}: prompts answered"
        self.feed.publish({"type": "progress", "text": text, "done": done, "total": total})

    def _shutdown(self) -> None:
        """End what this run started, so that a shared Ray cluster keeps no process of it."""
        runtime = getattr(self.trainer, "runtime", None)
        parts = [self.agent_loop_manager]
        if runtime is not None:
            groups = [runtime.actor_wg, runtime.ref_policy_wg]
            parts += [runtime.supervisor, runtime.server_manager, runtime.reward_manager, *groups, runtime.pools]
        for part in parts:
            close = getattr(part, "shutdown", None)
            if close is None:
                continue
            try:
                close()
            except Exception:  # noqa: BLE001 - the run's own result or error must not be replaced by a failed clean-up
                logger.warning("shutting down %s failed", type(part).__name__, exc_info=True)


def own_namespace() -> str:
    """Where this run's table lives: runs that share a Ray cluster must not share their trajectories."""
    return os.environ.get(NAMESPACE_ENV) or f"rlflow-{uuid.uuid4().hex[:12]}"


def configure_logging() -> None:
    """Log lines of this process go to stderr, which Ray forwards to the launcher; level from RLFLOW_LOGGING_LEVEL."""
    level = os.environ.get("RLFLOW_LOGGING_LEVEL") or os.environ.get("VERL_LOGGING_LEVEL") or "WARNING"
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("rlflow").setLevel(level.upper())
