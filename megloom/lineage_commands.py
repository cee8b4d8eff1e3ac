"""`megloom lineage …`: questions to a run's sealed steps.

Parses before anything heavy is imported. It alone joins the store's answers with the report's pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megloom.export_command import add_store, store_root

if TYPE_CHECKING:
    from megloom.compute.store.lineage.episode import EpisodeCalls

BAD_INPUT = 2
_Ask = Callable[[argparse.Namespace, str], None]


def register(commands: Any, parser_class: type[argparse.ArgumentParser]) -> None:
    """Adds `lineage` and its questions."""
    lineage = commands.add_parser("lineage", help="what made a policy version, and what came of a task")
    kinds = lineage.add_subparsers(required=True, metavar="WHAT", parser_class=parser_class)

    version = _kind(kinds, "version", "samples, calls, tasks and versions behind POLICY@V", _version)
    version.add_argument("version", metavar="POLICY@V", help="for example solver@17, or solver@last")

    task = _kind(kinds, "task", "the versions that a task influenced", _task)
    task.add_argument("task", metavar="TASK", help="a task's id")

    reward = _kind(kinds, "reward", "the versions that a reward function influenced", _reward)
    reward.add_argument("reward", metavar="HASH", help="the hash of its source")

    diff = _kind(kinds, "diff", "what only one of two versions has behind it", _diff)
    diff.add_argument("one", metavar="POLICY@V")
    diff.add_argument("other", metavar="POLICY@V")

    path = _kind(kinds, "path", "the shortest chain from a sample to a version", _path)
    path.add_argument("sample", metavar="SAMPLE", help="a sample's id")
    path.add_argument("version", metavar="POLICY@V")

    episode = _kind(kinds, "episode", "an episode's calls, and its graph as a picture", _episode)
    episode.add_argument("episode", metavar="EPISODE", help="its id, or that of one of its calls or samples")
    episode.add_argument("--svg", metavar="PATH", help="where the picture is written (default: <id>.svg)")

    sql = _kind(kinds, "sql", "one SELECT over the run's tables", _sql)
    sql.add_argument(
        "query", metavar="QUERY", help='such as "select agent, count(*) from samples group by 1"'
    )
    _add_verify(sql)

    views = _kind(kinds, "views", "a database file with the run's views, for any DuckDB client", _views)
    views.add_argument("path", metavar="PATH", help="for example run.duckdb; it must not exist")
    _add_verify(views)


def _kind(kinds: Any, name: str, text: str, ask: _Ask) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text)
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--rows", type=_positive, default=10, help="rows shown of each table (default: 10)")
    parser.set_defaults(command=lambda arguments: _answered(ask, arguments))
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of rows, 1 or more, got {text!r}")
    return int(text)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify", action="store_true", help="compare every file's digest first, not only its size"
    )


def _answered(ask: _Ask, arguments: argparse.Namespace) -> int:
    """Runs the question; what the store refuses or finds damaged is one line."""
    from megloom.compute.store.errors import StoreError

    try:
        ask(arguments, store_root(arguments))
    except FileExistsError as error:
        print(f"megloom: {error}", file=sys.stderr)
        return BAD_INPUT
    except StoreError as error:
        print(f"megloom: {error}", file=sys.stderr)
        return 1
    return 0


def _version(arguments: argparse.Namespace, root: str) -> None:
    from megloom.compute.store.lineage.backward import version_lineage
    from megloom.compute.store.lineage.text import lineage_text
    from megloom.compute.store.lineage.versions import parse_version

    policy, version = parse_version(arguments.version)
    _print(arguments, version_lineage(root, arguments.run, policy, version), lineage_text)


def _task(arguments: argparse.Namespace, root: str) -> None:
    from megloom.compute.store.lineage.forward import task_influence
    from megloom.compute.store.lineage.text import influence_text

    _print(arguments, task_influence(root, arguments.run, arguments.task), influence_text)


def _reward(arguments: argparse.Namespace, root: str) -> None:
    from megloom.compute.store.lineage.forward import reward_influence
    from megloom.compute.store.lineage.text import influence_text

    _print(arguments, reward_influence(root, arguments.run, arguments.reward), influence_text)


def _diff(arguments: argparse.Namespace, root: str) -> None:
    from megloom.compute.store.lineage.diff import lineage_diff
    from megloom.compute.store.lineage.text import diff_text
    from megloom.compute.store.lineage.versions import parse_version

    one, other = parse_version(arguments.one), parse_version(arguments.other)
    _print(arguments, lineage_diff(root, arguments.run, one, other), diff_text)


def _path(arguments: argparse.Namespace, root: str) -> None:
    from megloom.compute.store.lineage.path import lineage_path
    from megloom.compute.store.lineage.text import path_text
    from megloom.compute.store.lineage.versions import parse_version

    version = parse_version(arguments.version)
    _print(arguments, lineage_path(root, arguments.run, arguments.sample, version), path_text)


def _episode(arguments: argparse.Namespace, root: str) -> None:
    from megloom.compute.report.episode import episode_graph
    from megloom.compute.store.lineage.episode import episode_calls
    from megloom.compute.store.lineage.text import episode_text

    answer = episode_calls(root, arguments.run, arguments.episode)
    path = Path(arguments.svg or f"{answer.episode.episode_id}.svg")
    path.write_text(episode_graph(_story(answer)), encoding="utf-8")
    _print(arguments, answer, episode_text)
    if not arguments.json:
        print(f"picture: {path}")


def _story(answer: EpisodeCalls) -> Any:
    """The picture's parts. The last call's text stands as the result, as in the report."""
    from megloom.compute.report.episode import EpisodeStory

    last = answer.calls[-1] if answer.calls else None
    return EpisodeStory(
        episode=answer.episode,
        calls=answer.calls,
        edges=answer.edges,
        prompt=answer.task.prompt if answer.task else "",
        expected=answer.task.ground_truth if answer.task else "",
        result=last.text if last else None,
        chosen=last.invocation_id if last else None,
    )


def _sql(arguments: argparse.Namespace, root: str) -> None:
    from megloom.compute.store.lineage.sql import query
    from megloom.compute.store.lineage.table import rows_text

    max_rows = None if arguments.json else arguments.rows
    found = query(root, arguments.run, arguments.query, max_rows=max_rows, verify=arguments.verify)
    if arguments.json:
        rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
        print(json.dumps(rows, indent=2, ensure_ascii=False, default=str))
    else:
        print(rows_text(found.columns, found.rows, found.num_rows))


def _views(arguments: argparse.Namespace, root: str) -> None:
    from megloom.compute.store.lineage.sql import write_views

    names = write_views(root, arguments.run, Path(arguments.path), verify=arguments.verify)
    if arguments.json:
        print(json.dumps({"path": arguments.path, "views": names}, indent=2))
    else:
        print(f"{arguments.path}: {len(names)} views: {', '.join(names)}")


def _print(arguments: argparse.Namespace, answer: Any, text: Callable[[Any, int], str]) -> None:
    from megloom.compute.store.lineage.text import lineage_json

    print(lineage_json(answer) if arguments.json else text(answer, arguments.rows))
