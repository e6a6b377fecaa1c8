"""Answer the requests of the page's worker: JSON in, JSON out, in parts, each as soon as it is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from memcalc.errors import InputError, MemcalcError
from memcalc.page.request import NotInCatalogue, Request, RequestedRun, parsed, run_of
from memcalc.progress import Progress, silent
from memcalc.text import json_safe
from memcalc.units import Unit

UNIT: Unit = "GiB"

Part = dict[str, Any]
ReportProgress = Callable[[str], None]


def parts(request: str, report_progress: ReportProgress | None = None) -> Iterator[str]:
    """Answer a request; each part is JSON with its `part`.

    Args:
        request: a `Request` as JSON.
        report_progress: called with the progress of a search, as text.

    Yields:
        "answer": the `view`; then "section": a section that replaces the one with the same `place`; then "copies": the
        `document` as `--format json` prints it, and the run as a `command` and as `yaml`. Or "error": a message, and
        the `hub_id` if the error is that the catalogue lacks it.
    """
    try:
        read = parsed(request)
        yield from map(_dumped, _ANSWERS[read.kind](read, report_progress))
    except NotInCatalogue as error:
        yield _dumped({"part": "error", "message": str(error), "hub_id": error.hub_id})
    except MemcalcError as error:
        yield _dumped({"part": "error", "message": str(error)})


def text_of(document: Any) -> str:
    """Return a document as the command line prints it to a terminal with UTF-8."""
    return json_safe(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


def _dumped(part: Part) -> str:
    text = json.dumps(part, ensure_ascii=False)
    return text if part["part"] == "copies" else in_page_words(text)  # copies are for the command line


def _estimate(request: Request, _: ReportProgress | None) -> Iterator[Part]:
    from memcalc.api.sizing import estimate
    from memcalc.report.views.estimate import estimate_sections, estimate_view, generation_section, verdict_section
    from memcalc.report.views.timeline import memory_section

    run = run_of(request.run)
    result = estimate(run.spec).replayed
    waiting = {"kind": "waiting", "title": "Memory over the run", "place": "timeline"}
    view = estimate_view(result, estimate_sections(result, UNIT, [waiting], largest=False))
    view["sections"][0]["place"] = "verdict"
    yield {"part": "answer", "view": view}
    yield {"part": "section", "section": memory_section(result, UNIT) | {"place": "timeline"}}
    if result.generation is not None:
        yield {"part": "section", "section": generation_section(result, UNIT, largest=True)}
    else:
        from memcalc.verdict.reasons import reason_of

        section = verdict_section(result, UNIT, reason_of(result))
        yield {"part": "section", "section": section | {"place": "verdict"}}
    from memcalc.documents.result import document

    yield _copies(document(result), run, "estimate")


def _fit(request: Request, report_progress: ReportProgress | None) -> Iterator[Part]:
    from memcalc.api.searching import fit
    from memcalc.documents.fit import fit_document
    from memcalc.report.views.runs import fit_view

    run = run_of(request.run.model_copy(update={"gpus": ""}))
    wanted = {name: value for name in ("maximize", "minimize") if (value := getattr(request, name))}
    gpus = request.run.gpu_count
    answer = fit(run.source, *run.overrides, gpu=run.gpu, gpus=gpus, progress=_progress(report_progress), **wanted)
    more = [word for name, value in wanted.items() for word in (f"--{name}", value)]
    more += [] if gpus is None else ["--gpus", str(gpus)]
    yield {"part": "answer", "view": fit_view(answer, UNIT)}
    yield _copies(fit_document(answer), run, "fit", *more)


def _diff(request: Request, _: ReportProgress | None) -> Iterator[Part]:
    from memcalc.api.sizing import diff
    from memcalc.documents.check import difference_document
    from memcalc.report.views.runs import difference_view
    from memcalc.report.views.timeline import memory_section

    first = run_of(request.other).spec  # read first: pasted text of the second run overwrites its file
    second = run_of(request.run)
    difference = diff(first, second.spec)
    timelines = [memory_section(result, UNIT) for result in difference.results]
    yield {"part": "answer", "view": difference_view(difference, UNIT, timelines)}
    yield _copies(difference_document(difference), second, "estimate")


def _progress(report: ReportProgress | None) -> Progress:
    if report is None:
        return silent

    def progress(what: str, done: int, total: int | None = None) -> None:
        report(f"{what}: {done:,}" + ("" if total is None else f" of {total:,}"))

    return progress


def _copies(document: Any, run: RequestedRun, verb: str, *more: str) -> Part:
    try:
        text = run.as_yaml()
    except InputError as error:
        text = f"# {error}\n"
    return {"part": "copies", "document": text_of(document), "command": run.command(verb, *more), "yaml": text}


_ANSWERS: dict[str, Callable[[Request, ReportProgress | None], Iterator[Part]]] = {
    "estimate": _estimate,
    "fit": _fit,
    "diff": _diff,
}


_REPLACEMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"Add --gpu GPU or set hardware\.gpu; `memcalc gpus` lists the names\.", "Choose one."),
        (r"Add --gpu to check", "Choose a GPU to check"),
        (r"`memcalc fit` without --maximize lists", "A search without a largest value lists"),
        (r"; --why lists (them|it)", ""),
        (r": --why lists the excluded layouts", ""),
        (r"--gpu (?=\w)", "GPU "),
        (r"--set(?![\w-]):? ?", ""),  # "--set b=8": the field for other settings takes "b=8"
    )
)


def in_page_words(text: str) -> str:
    """Return a text, or a JSON document of texts, with the page's fields in place of options."""
    if "--" in text:
        for pattern, replacement in _REPLACEMENTS:
            text = pattern.sub(replacement, text)
    return text
