"""A user's reward function file, as the tests need it. Imported by the scorer processes."""

import asyncio
import os
import subprocess
import sys
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """`ground_truth` names what happens."""
    print("a scorer may print")
    action = str(ground_truth)
    if action == "hang":
        time.sleep(3600)
    if action == "hang holding the GIL":
        return 9**9**9
    if action == "hang with a child":
        child = subprocess.Popen(["sleep", "3600"])
        with open(extra_info["pid_file"], "w") as file:
            file.write(str(child.pid))
        child.wait()
    if action == "raise":
        raise RuntimeError("no idea\nof that")
    if action == "exit":
        sys.exit(3)
    if action == "crash":
        os._exit(7)
    if action == "kill":
        os.kill(os.getpid(), 9)
    if action == "recurse":
        return compute_score(data_source, solution_str, ground_truth, extra_info)
    if action == "nan":
        return float("nan")
    if action == "string":
        return "1.0"
    if action == "huge":
        return {"score": 1.0, "note": "x" * (1 << 22)}
    if action == "deep":
        value = []
        for _ in range(100_000):
            value = [value]
        return {"score": 1.0, "note": value}
    if action == "surrogate":
        return {"score": 1.0, "note": "\ud800\x00"}
    if action == "garbage":
        for fd in range(3, 64):
            try:
                os.write(fd, b"\xff\xff\xff\xff garbage")
            except OSError:
                pass
        time.sleep(3600)
    if action == "fork":
        return 5.0 if os.fork() == 0 else 1.0
    if action == "pid":
        return {"score": 1.0, "pid": os.getpid()}
    if action == "see":
        return {"score": 1.0, "seen": [data_source, solution_str, sorted(extra_info), kwargs]}
    return float(len(solution_str))


async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if ground_truth == "block the loop":
        time.sleep(3600)
    if ground_truth == "own timeout":
        raise TimeoutError("the judge did not answer")
    await asyncio.sleep(float(solution_str or 0))
    if ground_truth == "crash":
        os._exit(7)
    return {"score": 1.0, "pid": os.getpid()}
