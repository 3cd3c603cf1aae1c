"""The counts that the demonstration's page cites: `python -m memcorr.show.counts results` writes them anew.

They come from committed rollouts, never from the demonstration's own, which are too few to be counted. An installed
package has no results/, so they are kept beside the page's template; a test compares them with the rows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ..evaluation.episodes import EPISODES, Episode, read_episodes
from ..evaluation.intervention import Intervention
from ..files import digest_of
from ..policy.checkpoint import MODEL
from ..policy.policy import policy_folder
from ..spec import PhaseSource

COUNTS = Path(__file__).parent / "counts.json"


@dataclass(frozen=True)
class Cited:
    """Rows of one folder that say how often what a chapter shows succeeds."""

    chapter: str
    text: str
    folder: str  # of results/
    world: str
    condition: str
    phase_from: PhaseSource

    def holds(self, row: Episode) -> bool:
        usual = Intervention(phase_from=self.phase_from)
        here = (row.world, row.condition, row.disturbance) == (self.world, self.condition, "")
        shipped = digest_of(policy_folder("shipped") / MODEL)[:12]  # rows of weights that do not ship are not cited
        return here and row.shown == usual and row.checkpoint in ("", shipped)


CITED = (
    Cited("door", "learned policy {}", "memcorr-42", "door", "combined", "elapsed"),
    Cited("door", "servo {}", "servo", "door", "combined", "seen"),
    Cited("window", "servo {}", "servo-worlds", "window", "extreme", "seen"),
)


def counted(results: Path) -> dict[str, list[str]]:
    """By chapter; what has no rows is left out."""
    said: dict[str, list[str]] = {}
    for cited in CITED:
        rows = [row for row in read_episodes(results / cited.folder / EPISODES) if cited.holds(row)]
        if rows:
            share = f"{sum(row.success for row in rows)}/{len(rows)}"
            said.setdefault(cited.chapter, []).append(cited.text.format(share))
    return said


if __name__ == "__main__":
    COUNTS.write_text(json.dumps(counted(Path(sys.argv[1])), indent=1) + "\n")
