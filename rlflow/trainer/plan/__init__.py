"""What a command line would do: everything that follows from it, without Ray and without loading a model.

changes.py      which keys differ from their defaults, and why
batches.py      prompts, trajectories, rows of a rank, optimizer steps
placement.py    processes, where they run, CPUs and devices needed and found
memory.py       bytes of a device by part and phase; model_size.py counts the parameters
stage_plan.py   the stages of a step and their fields
text.py         all of it for a terminal

plan = make_plan(["actor_rollout_ref.rollout.name=hf", ...])      # ConfigError when it cannot work
plan.as_dict()                                                    # what `rlflow plan --json` prints
"""

from __future__ import annotations

from rlflow.trainer.plan.plan import Plan, describe_plan, make_plan

__all__ = ["Plan", "describe_plan", "make_plan"]
