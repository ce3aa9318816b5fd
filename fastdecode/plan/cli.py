"""`fastdecode-plan`: measures a machine, predicts what hardware serves a model, and simulates the engine on it.

Progress goes to stderr. Results go to stdout: as a table, or as one JSON object with --json.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.bench.cli import run_command

_MODULES = {
    name: f"fastdecode.plan.{name}"
    for name in ("measure", "recommend", "simulate", "stress", "trial", "validate", "published", "families", "resident")
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    run_command("fastdecode-plan", __doc__, _MODULES, argv)


if __name__ == "__main__":
    main()
