"""The report: every number from the rows alone, the paper's beside it, the same bytes every time."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from memcorr.errors import UserError
from memcorr.evaluation.episodes import EPISODES, Episode, Outcome, write_episodes
from memcorr.evaluation.evaluate import Sources, Subject, episode, list_jobs
from memcorr.evaluation.rounds import ROUNDS, SCENE_SEED, Round
from memcorr.files import write_json
from memcorr.report import paper
from memcorr.report.contests import contest
from memcorr.report.lookup import Lookup, door_follows, first_chunk_follows, matching
from memcorr.report.matching import Measured
from memcorr.report.page import complete, missing, write_report
from memcorr.report.paper import MATCHED, Line, Setting
from memcorr.report.robustness import exchanges, strangers, worlds
from memcorr.report.tables import comparison, ours
from memcorr.spec import TASKS
from memcorr.worlds.scenes import evaluation_scenes

ALL_LINES: tuple[Line, ...] = (
    *paper.SYSTEMS,
    *paper.REPRESENTATIONS,
    *paper.OBJECTIVE,
    *paper.REFERENCE,
    *paper.STRONG,
    *paper.PAIRING,
)


def rollouts(setting: Setting, successes: int, matcher: str = "embedded") -> list[Episode]:
    """All rollouts of a setting, of which the first `successes` succeed."""
    rows: list[Episode] = []
    shown = setting.shown
    if shown.matcher == MATCHED:
        shown = dataclasses.replace(shown, matcher=matcher)
    for seed in (42, 43, 44):
        for scene in evaluation_scenes(setting.condition):  # type: ignore[arg-type]
            for task in TASKS:
                rows.append(
                    Episode(
                        experiment=setting.experiment,
                        train_seed=seed,
                        condition=setting.condition,
                        scene=scene.index,
                        scene_seed=0,
                        u=scene.u,
                        camera_azimuth_deg=scene.camera_azimuth_deg,
                        task=task,
                        shown=shown,
                        success=len(rows) < successes,
                        steps=80,
                        replans=10,
                        fallback_replans=1,
                        mean_match_error_mm=5.0,
                        first_chunk_direction=task,
                        final_joint=-1.5 if task == "open" else -0.1,
                        seconds=1.0,
                        stage=setting.stage,
                        matched_replans=9,
                    )
                )
    return rows


@pytest.fixture(scope="module")
def as_published() -> list[Episode]:
    """Rollouts with exactly the paper's counts in every cell that the paper measured."""
    cells = {cell.setting: cell for line in ALL_LINES for cell in line.cells if cell.successes is not None}
    return [row for s, cell in cells.items() for row in rollouts(s, cell.successes or 0)]


def test_the_papers_counts_reproduce_the_papers_cells(as_published: list[Episode]) -> None:
    results = Lookup(as_published)
    for line in ALL_LINES:
        table = comparison(results, "", "", tuple("x" * len(line.label)), [line])
        if not any(cell.successes is not None for cell in line.cells):
            assert not table.rows
            continue
        values = table.rows[0][len(line.label) :]
        for theirs, mine, difference in zip(values[::3], values[1::3], values[2::3], strict=True):
            if theirs == "–":
                assert (mine, difference) == ("–", "–")
            else:
                assert mine.startswith(theirs) and float(difference) == 0


def test_the_papers_numbers_are_consistent() -> None:
    """Differences of the text follow from the counts of the tables."""
    counts = {
        cell.setting: 100 * cell.successes / cell.n
        for line in ALL_LINES
        for cell in line.cells
        if cell.successes is not None
    }
    for contrast in (c for c in paper.CONTRASTS if c.points is not None):
        assert counts[contrast.ours] - counts[contrast.theirs] == pytest.approx(contrast.points, abs=0.006)
    for _, setting, by_task in paper.BY_TASK:
        if None not in by_task:
            assert sum(by_task) / 1.5 == pytest.approx(counts[setting])  # type: ignore[arg-type]


def test_the_counts_are_those_of_the_papers_tables() -> None:
    """Row by row against the paper's own source, where it lies beside the repository."""
    source = Path(__file__).parents[2].parent / "shared" / "paper.tex"
    if not source.exists():
        pytest.skip("the paper's source is not here")
    rows: list[tuple[str, list[int]]] = []
    for line in source.read_text().splitlines():
        found = [int(k) for k in re.findall(r"(\d+)/(?:300|150) \(", line)]
        if found and line.rstrip().endswith(r"\\"):
            rows.append((line.split("&")[0].strip(), found))
    tables = (
        (paper.SYSTEMS, ["Visual U-Net", "Visual Transformer", r"\method"]),
        (paper.REPRESENTATIONS, ["Full relation condition", "Motion only", "Object centroid"]),
        (paper.OBJECTIVE, ["Standard", "", "", "Counterfactual", "paired", ""]),
        (
            paper.REFERENCE,
            ["Ground-truth relation, correct", r"\romavtwo, correct", "Empty relation", r"\romavtwo, opposite"],
        ),
        (paper.STRONG, [r"Full \romavtwo", "Ground-truth correspondence", "Motion only", "Object centroid"]),
    )
    for lines, names in tables:
        published = [[c.successes for c in line.cells if c.successes is not None] for line in lines]
        expected, rows = rows[: len(names)], rows[len(names) :]
        assert expected == list(zip(names, [counts for counts in published if counts], strict=True))
    assert not rows


def test_unmeasured_cells_say_so_and_no_rollout_is_dropped() -> None:
    rows = rollouts(Setting(condition="combined"), 100)
    odd = rollouts(Setting(condition="camera").showing(phase_offset=3), 10)
    tables = {table.title: table for table in complete(Lookup([*rows, *odd]), Measured([], []))}
    systems = tables["Complete policy systems"].rows
    assert systems[0][3] == "–" and systems[0][6].startswith("100/150 (66.67 %)")
    assert "phase +3" in tables["Further measurements"].rows[0][3]
    assert "Paired differences" not in tables


def test_rollouts_through_another_camera_have_a_table_of_their_own_and_scenes_are_told_apart() -> None:
    plain = rollouts(Setting("memcorr-measured"), 300)
    assert not strangers(plain).rows
    fixed = [dataclasses.replace(e, camera="0a1b2c3d", disturbance="depth-noise=1") for e in plain]
    fresh = [dataclasses.replace(e, scene_seed=7, success=False) for e in fixed]
    table = strangers([*plain, *fixed, *fresh])
    assert [row[3] for row in table.rows] == ["boundary, seed 0", "boundary, seed 7"]
    assert [row[-1][:7] for row in table.rows] == ["300/300", "0/300 ("]


def test_other_worlds_and_exchanged_references_have_tables() -> None:
    one = rollouts(Setting(), 300)[0]
    there = [
        dataclasses.replace(one, world="window", shown=dataclasses.replace(one.shown, **change), success=not change)
        for change in ({}, {"reference": "opposite"}, {"swap": 48})
    ]
    lookup = Lookup(there)
    found = worlds(lookup)
    assert found is not None and [row[:3] for row in found.rows] == [
        ("window", "Boundary extrapolation", "correct"),
        ("window", "Boundary extrapolation", "opposite"),
    ]
    assert [row[3][:3] for row in found.rows] == ["1/1", "0/1"]
    assert [row[1:3] for row in exchanges(lookup).rows] == [("window", "48")]
    assert worlds(Lookup([one])) is None and not exchanges(Lookup([one])).rows


def test_one_matcher_fills_the_report() -> None:
    a, b = rollouts(Setting(), 300, "embedded"), rollouts(Setting(), 0, "flow")
    for matcher, successes in ((None, 300), ("embedded", 300), ("flow", 0)):
        assert sum(e.success for e in Lookup([*a, *b], matcher).of(Setting())) == successes
    with pytest.raises(UserError, match="no rollout"):
        Lookup([])


def test_where_all_end_alike_the_interval_counts_configurations() -> None:
    shown = ours(rollouts(Setting(), 300))
    assert shown == "300/300 (100.00 %) [92.9, 100.0 exact]"  # 50 configurations, whatever the tasks and seeds
    assert ours(rollouts(Setting(), 0)) == "0/300 (0.00 %) [0.0, 7.1 exact]"


def test_a_row_without_rollouts_is_absent_and_named_once() -> None:
    lookup = Lookup(rollouts(paper.MAIN, 290))
    table = comparison(lookup, "t", "c", ("Method", "Params"), paper.SYSTEMS)
    assert [row[0] for row in table.rows] == ["MemCorr-DP, memcorr-literal"]
    said = missing(lookup)
    assert "visual-unet" in said and "memcorr-literal" not in said


def test_error_tables_stand_beside_the_papers(tmp_path: Path) -> None:
    errors = {"median_mm": 1.5, "mean_mm": 2.5, "p95_mm": 9.5, "p99_mm": 20.5, "rows": 100, "valid_points": 1500}
    one = {**errors, "matcher": "embedded", "lifting": "paper", "auc": 0.91, "weights": ""}
    live = {**one, "lifting": "rigid", "world": "plate", "setting": "camera", "first_frame": {**errors, "mean_mm": 3.5}}
    (tmp_path / "errors.json").write_text(json.dumps(one))
    (tmp_path / "matching.json").write_text(json.dumps({"tables": [live]}))
    tables = {t.title: t for t in complete(Lookup(rollouts(Setting(), 9)), Measured.find([tmp_path]))}
    door = tables["Matching error, door, like for like"]
    assert door.rows[1][:4] == ("10,000 training rows, mean", "7.95 mm", "2.50 mm", "–")
    (row,) = next(t for title, t in tables.items() if "ten worlds" in title).rows
    assert row == ("plate", "±15°", "1.5 / 3.5 / 9.5, 94 %", "–", "1.5 / 2.5 / 9.5, 94 %", "–")


def test_error_tables_are_checked_before_they_are_reported(tmp_path: Path) -> None:
    errors = {"median_mm": 1.5, "mean_mm": 2.5, "p95_mm": 9.5, "p99_mm": 20.5, "rows": 100, "valid_points": 1500}
    path = tmp_path / "errors.json"
    write_json(path, {**errors, "matcher": "embedded", "lifting": "rigid"})
    assert Measured.find([tmp_path]).cache[0].mean_mm == 2.5
    path.write_text(path.read_text().replace("2.5", '"small"'))
    with pytest.raises(UserError, match=r"errors\.json is not an error table \(mean_mm: expected float, got str"):
        Measured.find([tmp_path])


def test_decisions_weigh_the_same_in_the_matching_error() -> None:
    one, two = rollouts(Setting(), 1)[:2]
    pooled = matching(
        [
            dataclasses.replace(one, mean_match_error_mm=10.0, matched_replans=1, replans=2),
            dataclasses.replace(two, mean_match_error_mm=20.0, matched_replans=3, replans=3),
            dataclasses.replace(two, mean_match_error_mm=None, matched_replans=0, replans=4, fallback_replans=4),
        ]
    )
    assert pooled.mean_error_mm == pytest.approx(17.5)
    assert (pooled.fallbacks, pooled.decisions) == (6, 9)


def test_following_is_judged_against_the_supplied_reference() -> None:
    row = rollouts(Setting().showing(reference="opposite"), 0)[0]  # task open, so closing was shown
    assert not first_chunk_follows(row) and not door_follows(row)
    turned = dataclasses.replace(row, first_chunk_direction="close", final_joint=-0.5)
    assert first_chunk_follows(turned) and door_follows(turned)
    assert not door_follows(dataclasses.replace(row, final_joint=-0.7854)), "a door that stood still follows nobody"


@pytest.mark.long
def test_the_report_is_the_same_bytes_and_self_contained(tmp_path: Path) -> None:
    rows = [*rollouts(Setting(condition="combined"), 120), *rollouts(Setting(), 300)]
    rows += [*rollouts(Setting().showing(phase_offset=16), 200), *rollouts(paper.OBJECTIVE[0].cells[0].setting, 150)]
    np.random.default_rng(0).shuffle(rows)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_episodes(tmp_path / "a" / EPISODES, rows)
    write_episodes(tmp_path / "b" / EPISODES, [dataclasses.replace(e, seconds=9.0) for e in rows])
    for name in "ab":
        page = write_report([tmp_path / name], tmp_path / f"out-{name}")
        text = page.read_text()
        assert "http://" not in text.replace("http://www.w3.org", "") and "src='data:image" in text
    written = (tmp_path / "out-a").rglob("*")
    files = sorted(str(path.relative_to(tmp_path / "out-a")) for path in written if path.is_file())
    names = ("main", "objective", "phase", "positions", "robustness")
    assert files == sorted([*(f"figures/{n}.png" for n in names), "report.html", "REPORT.md"])
    for file in files:
        assert (tmp_path / "out-a" / file).read_bytes() == (tmp_path / "out-b" / file).read_bytes(), file


@pytest.mark.long
def test_the_committed_report_follows_from_the_committed_rollouts(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "results"
    write_report([results], tmp_path)
    assert (tmp_path / "REPORT.md").read_bytes() == (results / "REPORT.md").read_bytes()


def rolled_out(one: Round, who: str, stage: str, every: int) -> list[Episode]:
    """The rows that `contest` would write for a round; every so many of them is a failure."""
    subject = Subject("", who, None, stage, "", None)
    shown = dataclasses.replace(one.shown, phase_from="seen")
    rows: list[Episode] = []
    for world in one.worlds:
        for disturbance in one.disturbances or (None,):
            named = () if disturbance is None else (disturbance,)
            for job in list_jobs(one.conditions, SCENE_SEED, (), one.scenes, world, named):
                outcome = Outcome(success=len(rows) % every != 0)
                rows.append(episode(subject, shown, job, Sources({}, ""), outcome))
    return rows


def test_the_contest_counts_every_round_and_pairs_it_with_who_learned_nothing() -> None:
    many, servo = (
        {one.name: rolled_out(one, who, stage, every) for one in ROUNDS}
        for who, stage, every in (("memcorr-many", "final", 1000), ("servo", "scripted", 2))
    )
    both = [row for side in (many, servo) for rounds in side.values() for row in reversed(rounds)]
    rows = list({row.key: row for row in reversed(both)}.values())  # as in a file
    assert contest([row for rounds in servo.values() for row in rounds], "embedded") is None
    elsewhere = [dataclasses.replace(row, scene_seed=7) for row in rows]
    table = contest([*rows, *elsewhere], "embedded")
    assert table is not None and [line[0] for line in table.rows] == [one.name for one in ROUNDS]
    assert table.header == ("Round", "memcorr-many, learned", "Servo, not learned", "learned minus servo")
    for one, (_, learned, other, ahead) in zip(ROUNDS, table.rows, strict=True):
        unique = {row.key: row for row in many[one.name]}
        assert all(one.has(row) for row in unique.values()), one.name
        if one.name != "the door's four shifts":  # its first part is the door's part of the trained worlds
            assert learned.startswith(f"{len(unique) - 1}/{len(unique)} "), (one.name, learned)
            assert other.startswith(f"{len(unique) // 2}/{len(unique)} "), (one.name, other)
            points = 100 * (len(unique) // 2 - 1) / len(unique)
            assert ahead.startswith(f"{points:+.1f} ["), (one.name, ahead)
    apart = [one for one in ROUNDS if one.name != "the door's four shifts"]
    for row in (row for one in apart for row in many[one.name]):
        assert sum(one.has(row) for one in apart) == 1, row
