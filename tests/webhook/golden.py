"""Makes the ``.after.yaml`` of every golden pod anew and shows the difference for review.

``python -m tests.webhook.golden`` shows it; with ``--write`` it is also written.
"""

from __future__ import annotations

import copy
import difflib
import sys
from typing import Any

import yaml

from tests.webhook.support import GOLDEN, Golden, golden_pairs
from webhook.decision import Origin, Plan, Skip
from webhook.inject import Target, inject


def make(pair: Golden) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the pod and what becomes of it, by the code as it is now."""
    pod = copy.deepcopy(pair.pod)
    target = Target(pair.config, pair.level or pair.config.default_level, pair.oldest)
    name = str(pair.pod["metadata"].get("name") or "")
    origin = Origin(uid=pair.uid, namespace=pair.namespace, name=name)
    decision = inject(pod, target, origin=origin)
    if isinstance(decision.outcome, Skip):
        outcome = decision.outcome.value
    else:
        outcome = "injected" if isinstance(decision.outcome, Plan) else "restored"
    return {"outcome": outcome, "warnings": list(decision.warnings)}, pod


def main() -> int:
    """Runs the generator."""
    changed = 0
    for pair in golden_pairs():
        path = GOLDEN / f"{pair.name}.after.yaml"
        text = yaml.safe_dump_all(make(pair), sort_keys=False, width=100)
        old = path.read_text() if path.exists() else ""
        if text == old:
            continue
        changed += 1
        difference = difflib.unified_diff(
            old.splitlines(keepends=True), text.splitlines(keepends=True), "as it is", path.name
        )
        sys.stdout.writelines(difference)
        if "--write" in sys.argv:
            path.write_text(text)
    print(f"{changed} differ", file=sys.stderr)
    return 1 if changed and "--write" not in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
