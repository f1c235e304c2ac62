"""The console script `rlflow`: tools around a run, one module a subcommand."""
