"""The SGLang rollout engine (`rollout.name=sglang`): `sglang.Engine` inside a server actor."""
