"""`python -m rlflow.cli` is `rlflow`."""

from rlflow.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
