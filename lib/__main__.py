"""The command line: run, sweep, freeze, look at, refresh a chapter; build the book."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import as_completed
from pathlib import Path

from lib import chapters
from lib.config import InputError


def _train(chapter: str, profile: str, experiments: dict, values: dict) -> dict:
    """Train what is absent, in this process's terminal, as the chapter would."""
    from lib.sweep import sweep

    return sweep(
        experiments,
        chapter=chapter,
        profile=profile,
        workers=values.get("workers", 0),
        device=values.get("device", "auto"),
    )


def _estimate(chapter: str, profile: str, experiments: dict, values: dict) -> None:
    """Say what is missing and what it will cost."""
    from lib.estimate import estimate

    if not experiments:
        print(f"{chapter}: has no runs to train")
        return
    table = estimate(experiments, workers=values.get("workers", 0), device=values.get("device", "auto"))
    print(f"{chapter}, profile {profile}: at most, since a run that emerges ends before its budget")
    print(table.to_string(index=False, formatters={"member-steps": "{:,}".format, "hours": "{:.2f}".format}))


def _prepare(chapter: str, profile: str, overrides: dict, out: Path | None = None) -> None:
    """Check everything, then train what is missing where progress can be seen."""
    values = chapters.parameters(chapter, profile, overrides)
    experiments = chapters.grid(chapter, profile, overrides)
    chapters.output(chapter, out)
    print(f"{chapter}: profile {profile}", flush=True)
    if experiments and values.get("missing") != "skip":
        _train(chapter, profile, experiments, values)


def _say(chapter: str, path: Path, start: float) -> None:
    print(f"{chapter}: done in {time.monotonic() - start:.0f} s: {os.path.relpath(path)}", flush=True)


def _execute(todo: list[tuple], workers: int) -> None:
    """Execute chapters (name, profile, overrides) side by side; the last of them, which take longest, begin.

    Their kernels share the cores: threads that wait for each other's cores cost more than the second chapter gains.
    """
    from lib.sweep import give_up, worker_pool

    start = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    with worker_pool(workers) as pool:
        try:
            futures = {pool.submit(chapters.execute, *one): one[0] for one in reversed(todo)}
            for future in as_completed(futures):
                _say(futures[future], future.result(), start)
        except BaseException:  # one failed, or it was interrupted: the others are given up
            give_up(pool)
            raise


def run(args) -> None:
    """Check everything, train what is missing where progress can be seen, then execute the chapter."""
    overrides = chapters.parse(args.chapter, dict(args.p))
    if args.estimate:
        values = chapters.parameters(args.chapter, args.profile, overrides)
        _estimate(args.chapter, args.profile, chapters.grid(args.chapter, args.profile, overrides), values)
    else:
        start = time.monotonic()
        _prepare(args.chapter, args.profile, overrides, args.out)
        _say(args.chapter, chapters.execute(args.chapter, args.profile, overrides, args.out), start)


def sweep(args) -> None:
    """Train the runs of a chapter that the store lacks, without the notebook."""
    overrides = chapters.parse(args.chapter, dict(args.p))
    experiments = chapters.grid(args.chapter, args.profile, overrides)
    if args.experiment:
        experiments = {args.experiment: experiments[chapters.one_of("experiment", args.experiment, list(experiments))]}
    values = chapters.parameters(args.chapter, args.profile, overrides)
    if args.estimate:
        return _estimate(args.chapter, args.profile, experiments, values)
    for name, result in _train(args.chapter, args.profile, experiments, values).items():
        states = ", ".join(f"{count} {state}" for state, count in result.rows.status.value_counts().items())
        print(f"{args.chapter}: {name}: {result} ({states})")


def freeze(args) -> None:
    """Copy a chapter's finished runs, and what it measured inside them, from the store into book/results, where git keeps them."""
    from lib import measured, store

    experiments = chapters.grid(args.chapter, args.profile)
    runs = [run for experiment in experiments.values() for run in experiment]
    count = store.freeze(runs, store.Store(), args.chapter, args.profile)
    keys = {run.key for run in runs}
    inside = measured.freeze(keys, store.Store(), args.chapter, args.profile)
    print(f"{args.chapter}: {count} of {len(keys)} runs frozen for profile {args.profile}, and {inside} measurements inside them")


def look(args) -> None:
    """Train the finished runs of a chapter's first experiment again, and ship their attention before, at and after the jump."""
    from lib import browser, files, sweep

    path = browser.frozen(args.chapter, args.profile)
    kept = browser.kept(path)
    todo = [run for run in browser.first(args.chapter, args.profile) if run.key not in kept]
    pool = sweep.worker_pool(max(1, min(os.cpu_count() or 1, len(todo))))
    try:
        for done in as_completed(asked := {pool.submit(browser.look, run): run.key for run in todo}):
            kept[asked[done]] = done.result()
            files.write(path, json.dumps(kept).encode())
    except BaseException:
        sweep.give_up(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    print(f"{args.chapter}: attention of {len(kept)} runs in {os.path.relpath(path)}")


def refresh(args) -> None:
    """Run a chapter at its defaults and store the outputs that the tests compare."""
    print(os.path.relpath(chapters.refresh(args.chapter)))


def build(args) -> None:
    """Every chapter at the best profile that results exist for, or the given one; then the scorecard and the site."""
    from lib import claims, site

    names, todo = chapters.names(), []
    for chapter in names:
        profile = args.profile or chapters.best_profile(chapter)
        frozen = not args.profile and profile != "quick" and "missing" in chapters.parameters(chapter)
        todo.append((chapter, profile, {"missing": "skip"} if frozen else {}))
        _prepare(*todo[-1])
    split = names.index("scorecard") if "scorecard" in names else 0  # it and those after it read what those before it measured
    if split:
        _execute(todo[:split], min(4, os.cpu_count() or 1))
    for one in todo[split:]:
        start = time.monotonic()
        _say(one[0], chapters.execute(*one), start)
    claims.write_scorecard(chapters.build_folder() / "scorecard.json")
    print(f"site: {os.path.relpath(site.build())}")


def pdf(args) -> None:
    """The built site as one PDF, book.pdf in the build folder; needs Chromium."""
    from lib import pdf

    out = chapters.build_folder() / "book.pdf"
    sheets = pdf.write(pdf.pages(chapters.build_folder() / "html"), out)
    print(f"{os.path.relpath(out)}: {sheets} pages")


def bench(args) -> None:
    """Our loop against the textbook one, interleaved in one run: a table, and bench.json in the build folder."""
    from lib import bench
    from lib.train import resolve_device

    if resolve_device(args.device) == "cuda":
        bench.bench_gpu(chapters.build_folder() / "bench-gpu.json")
    else:
        bench.bench(chapters.build_folder() / "bench.json")


def audit(args) -> None:
    """Train shipped runs again, drawn at random, from their configuration alone; compare, and leave audit.json in the build folder."""
    from lib import audit

    record = audit.audit(args.n, args.seed, args.longest, args.workers)
    print(f"drawn with seed {record['seed']} from {record['eligible']} of {record['shipped']} shipped runs, on {record['machine']}")
    print(audit.table(record).to_string(index=False))
    print(os.path.relpath(audit.write(record, chapters.build_folder() / "audit.json")))
    if failed := [row["run"] for row in record["runs"] if not row["agrees"]]:
        raise chapters.BookError(f"audit: {len(failed)} of {args.n} runs do not agree with what is shipped; the first is {failed[0]}")


def pythia(args) -> None:
    """When Pythia's capabilities emerge, by its public checkpoints, and which heads carry them."""
    from lib.language import pythia

    options = {name: getattr(args, name) for name in ("folder", "cache", "gigabytes", "stride", "device")}
    pythia.run(args.size, args.seed, **options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lib", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(action, chapter=True, profile="quick", p=False):
        sub = commands.add_parser(action.__name__, help=action.__doc__, description=action.__doc__)
        sub.set_defaults(action=action)
        if chapter:
            sub.add_argument("chapter", help="its name, such as theory")
        if profile != "":
            sub.add_argument("--profile", default=profile, metavar="P", help=", ".join(chapters.PROFILES))
        if p:
            sub.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter")
        return sub

    runs, sweeps = command(run, p=True), command(sweep, p=True)
    runs.add_argument("--out", type=Path, help="where the executed notebook goes")
    sweeps.add_argument("--experiment", metavar="E", help="only this one of the chapter's experiments")
    for sub in (runs, sweeps):
        sub.add_argument("--scheduler", metavar="S", help="dask, tcp://HOST:PORT, tls://HOST:PORT or a scheduler file")
        sub.add_argument("--plain", action="store_true", help="connect without TLS beyond this machine: a network of your own")
        sub.add_argument("--estimate", action="store_true", help="only say what is missing and how long it will take here")
    command(freeze)
    command(look)
    command(refresh, profile="")
    command(build, chapter=False, profile=None)
    command(pdf, chapter=False, profile="")
    command(bench, chapter=False, profile="").add_argument("--device", default="cpu", help="cpu, or cuda for bench-gpu.json")
    audits = command(audit, chapter=False, profile="")
    audits.add_argument("-n", type=int, default=5, help="how many runs")
    audits.add_argument("--seed", type=int, help="of the draw; drawn and printed if not given")
    audits.add_argument("--longest", type=float, default=300.0, metavar="S", help="leave out runs that took more seconds than this")
    audits.add_argument("--workers", type=int, default=0, help="processes; 0: one a core")
    models = command(pythia, chapter=False, profile="")
    models.add_argument("--size", default="14m", help="of the model, such as 14m or 410m")
    models.add_argument("--seed", type=int, default=0, help="0: the first run; 1 to 9: the runs with other seeds")
    models.add_argument("--folder", type=Path, help="where checkpoints lie, as <model>/step<n>/; else they are downloaded")
    models.add_argument("--cache", type=Path, help="where downloads are kept")
    models.add_argument("--gigabytes", type=float, default=5.0, help="how much of them to keep")
    models.add_argument("--stride", type=int, default=0, metavar="N", help="check the search by a scan of every Nth checkpoint")
    models.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad input, 1 for a chapter that failed, 130 when interrupted."""
    args = _parser().parse_args(argv)
    for name in ("BOOK_DIR", "BOOK_STORE", "BOOK_BUILD", "BOOK_RESULTS"):  # chapters run in another folder
        if os.environ.get(name):
            os.environ[name] = os.path.abspath(os.environ[name])
    if getattr(args, "scheduler", None):
        os.environ["BOOK_SCHEDULER"] = args.scheduler
    scheduler = os.environ.get("BOOK_SCHEDULER", "")
    if scheduler not in ("", "dask") and "://" not in scheduler:
        os.environ["BOOK_SCHEDULER"] = os.path.abspath(scheduler)
    if getattr(args, "plain", False):
        os.environ["BOOK_PLAIN"] = "1"
    try:
        args.action(args)
    except (InputError, chapters.BookError) as e:
        print("python -m lib:", " ".join(str(e).split()), file=sys.stderr)
        return 2 if isinstance(e, InputError) else 1
    except KeyboardInterrupt:
        print("\npython -m lib: interrupted; finished runs are kept, the next call goes on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
