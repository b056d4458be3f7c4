"""Fail when a sentence is not plain English.

The check reads the docstrings, comments, messages, help texts and test names of Python files, and Markdown files
outside code blocks. ``--rules`` explains the rules.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS = 25
MAX_SUMMARY = 100
MAX_TEST_NAME = 70
MAX_ASIDES = 2

RULES = {
    "clause": "A clause or an indefinite pronoun hides the actor. Name it: the agent, rank 0, the caller.",
    "idiom": "A private idiom sends the reader to a dictionary. Use the field's verb.",
    "coined": "A coined word must be learned first. Use the field's word.",
    "long": f"A sentence over {MAX_WORDS} words is read twice. Write two sentences or a list.",
    "summary": f"Tools show only the first line. Write one sentence of at most {MAX_SUMMARY} characters and a period.",
    "help": "A help text is read without context. Start with a verb or with the noun that the option sets.",
    "test-name": f"A test name opens a bug report. Write test_<thing>_<behavior>, at most {MAX_TEST_NAME} characters.",
    "asides": f"More than {MAX_ASIDES} parentheses or semicolons bury the main clause. Write more sentences or a list.",
}

# Parts of the expressions below.
IS = r"(?:is|are|was|were)"
BE = r"(?:is|are|was|were|be|been|being)(?: not| never| \w+ly)?"
OPEN = r"(?:^|[,;:] |\b(?:and|or|but) )[\"'(*]*"
PROCESS = r"(?:node|rank|process|agent|job|member|reader|writer|thread|server|trainer|supervisor|client|one)(?:s|es)?"
A_STEP = r"(?:steps?|versions?|checkpoints?|shards|copies|ones?)\b"
BEFORE_WHAT = r"(?:of|by|with|from|to|for|in|than|into|against|before|after|as|until|(?<!depends )(?<!depend )on)"

# Each entry has a name for the summary, a regular expression, and plain words.
CLAUSES = [
    ("whoever", r"\bwho(?:m|se)?ever\b", "the reader, the next run, the caller"),
    ("who …", rf"{OPEN}whom?\b|^whose\b|\b{PROCESS},? whom?\b", "the node, the rank, the process"),
    ("whatever", OPEN + r"whatever\b(?! (?:the|its|their|that) [\w-]+(?: [\w-]+)?(?:[,.;:)]|$))", "any …"),
    ("what …", rf"(?:{OPEN}|\b{BEFORE_WHAT} )what\b(?! (?:to|happens|kind|extent|about|CODE)\b|[?'])", "the noun"),
    ("how …", r"^(?:how|where|why)\b(?! (?:to|it works)\b)[^,;]*\.$", "a noun with its unit"),
    ("somebody", r"\b(?:some|any|every)(?:body|one)\b", "the caller, any process, every node"),
    ("nobody", r"(?<!user )(?<!\bas )\b(?:nobody|no one)\b(?!:)", "no process, no node"),
    ("one that …", OPEN + r"(?:those|(?:(?:the|that|this) )?ones?) (?:that|who|whom|whose|which)\b", "the noun"),
]
IDIOMS = [
    ("goes on", r"\b(?:go|goes|went|gone) on\b(?! (?:the|a|this|its|top|disk)\b)", "continue, resume"),
    ("gets on", r"\b(?:get|gets|got) on\b(?! the\b)", "progress, finish a step"),
    ("comes of", r"\b(?:comes?|came) (?:to be|of)\b|\b(?:becomes?|became) of\b", "become, result from, happen to"),
    ("is told", rf"\b{BE} told\b(?! (?:from|apart)\b)", "receive, be notified"),
    ("is said", rf"\b{BE} said\b|\b(?:say|says|said|saying) so\b", "report, announce"),
    ("says nothing", r"\b(?:says?|said|gives?|gave|gets?|got|takes?|took) (?:no|every)thing\b", "no data, all data"),
    ("hears", r"\b(?:hear|hears|heard|hearing)\b", "receive, learn"),
    ("is asked", rf"\b{BE} asked\b", "receive a request, be requested, be preempted"),
    ("gives way", r"\b(?:give|gives|gave|giving|given) way\b", "be evicted, be skipped"),
    ("lets go", r"\b(?:let|lets|letting) (?:\w+ )?go\b", "release, free"),
    ("is there", rf"\b{BE} there\b(?! (?:a|an|any|no)\b)", "exist, be present"),
    ("what there is", rf"\b(?:what|all|those|as|than|where|that) there {IS}\b|\bthere {IS}(?=[,.;:)]|$)", "existing"),
    ("there is none", rf"\bthere {IS} (?:none|nothing|nobody|one(?=[,.;:)]|$| that))", "no … exists"),
    ("so many", r"\bso (?:many|few|long|much)\b(?! (?:as|that|more|less|for)\b)|\bas (?:many|few|much) as\b", "N"),
    ("nothing of it", r"\b(?:no|some|any)thing of (?:it|them|that|this|what|the)\b", "no …"),
    ("any more", r"\bany more\b(?! (?:than|\w+s)\b)", "no longer"),
    ("on its way", r"\bon (?:its|their|the) way\b|\b(?:under|by) way\b", "in flight, in progress, through"),
    ("is no", rf"(?<!there )\b{IS} no (?!longer|more|way|need|reason|one\b|use\b)[a-z]", "is not a"),
    ("is to …", rf"\b(?:it|they|that|which|who|what|{PROCESS}) {IS} to [a-z]", "should, must, will"),
    ("from … on", r"\bfrom (?:the|a|its|that|CODE|\d+)(?: (?!on\b)\w+){0,2} on(?:[,.;:)]|$)", "starting with"),
    ("without a word", r"\b(?:without|not|no) (?:a |one )?word\b|\bword of\b|\w's word\b", "silently; a report"),
    ("is of", rf"\b{BE} of (?:a|an|another|no|one|this|that) (?!form|kind|type|size|order|use|more)", "belong to"),
    ("is waited for", rf"\b{BE} waited for\b", "X waits for it"),
    ("also where", r"\balso (?:where|when|while|if|before|after|with|without|of|for|as)\b", "even if, even when"),
    ("Where … (if)", r"^Where [^,;:]+, (?:the|a|an|it|they|that|this|each|every|all|no|one|its|CODE)\b", "if, when"),
]
COINED = [
    ("whole", rf"\b(?:{BE}|becomes?|became|not|yet) whole\b|(?<!\bthe )\bwhole {A_STEP}|^whole$", "complete"),
    ("settled", r"(?<!it is )\bsettled\b", "replicated, committed"),
    ("torn", r"\btorn\b(?! (?:down|write|page|read|line)s?)", "incomplete"),
    ("left out", r"(?<!may be )(?<!can be )\bleft out\b", "missing, skipped"),
    ("way", r"\bways? (?:to|from|between|through) (?:a|one|the|its) (?:first|next|last|fault|world)\b", "recovery"),
    ("note (v.)", r"\bnoted\b|\bnotes (?:the|what|it|them|a)\b|\bto note (?!that)", "snapshot, record"),
]
FIXED_IDIOMS = """
in vain: without success; by then: already; at hand: available; anew: again, new; again and again: repeatedly;
for ever: forever; without end: infinite; without a rest: completely; as they are: unchanged; how manieth: N-th;
beside: next to, compared with; proven on: tested on; proven by: tested by; to its end: to completion; to an end: ended
"""
COINED_WORDS = """
given up: released, discarded; the living: live members; scribe: leader; lookout: delegate; district: partition;
desk: server, job state; seat: local rank, assignment; shelf: slot table; tidings: reports; rumour: update;
duty: pending replica; duties: pending replicas; overseer: progress hook; survey: inventory; mend: repair;
settled mark: committed flag; kept step: pinned step; for a place: for a rank
"""
for table, words, ending in ((IDIOMS, FIXED_IDIOMS, ""), (COINED, COINED_WORDS, "s?")):
    for name, instead in (entry.split(": ") for entry in " ".join(words.split()).split("; ")):
        table.append((name, rf"\b{name}{ending}\b", instead))
PHRASES = {"clause": CLAUSES, "idiom": IDIOMS, "coined": COINED}

OPENERS = "who|what|where|when|while|if|until|as|also|only|or|without|after|before|those"
HELP_OPENING = re.compile(
    rf"(?i)(?:[\[(]|default:|so many\b|the same\b|(?:\S+ ){{1,3}}(?:there|those)\b|(?:{OPENERS}|of|over|with|in|on"
    r"|at|for|from|by|under|instead|again|their|whom|which|why|how)\b(?! (?:to|happens)\b))"
)
NOT_A_SUMMARY = re.compile(rf"(?i)(?:{OPENERS}|so|but|and|then|they|there|this|these|that|it|not?|nobody|nothing)\b")
CODE = re.compile(
    r":[a-z:]+:`[^`]*`|``[^`]+``|`[^`]+`|https?://[^\s)>]+|%\(\w+\)[a-z]|(?<![\w'])'[^'\s]+'(?!\w)|\"[^\"\s]+\"|\{\}"
)
PARAGRAPH_END = r"\n[ \t]*\n|\n[ \t]*(?=(?:[-*+]|\d+[.)]|:\w+[^:]*:) )"
SENTENCE_END = r"(?<!e\.g)(?<!i\.e)(?<!vs)(?<!etc)[.!?][\"')\]*]*\s+(?=[\"'`(*\[{]*[A-Z`{:\d])"
NOT_PROSE = re.compile(r"(?:noqa|type:|pragma|fmt:|ruff:|mypy:|-\*-|!).*|-- .*")
HELP_WORDS = ("help", "short_help", "epilog", "description")
PRINTER = re.compile(r"(?:^|\.)(?:print|echo|secho|debug|info|warning|warn|error|exception|critical|log|fail|skip)$")


class Prose(NamedTuple):
    """A text of a file. Its kind is docstring, comment, message, help, command, test or markdown."""

    path: str
    line: int
    kind: str
    text: str


class Hit(NamedTuple):
    """A sentence that breaks a rule, the phrases in it, and the offset of the first phrase."""

    path: str
    line: int
    rule: str
    sentence: str
    phrases: tuple[str, ...] = ()
    instead: str = ""
    at: int = 0


def literals(node: ast.expr) -> list[str]:
    """Return the texts of a string expression, with `{}` for each computed value."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return literals(node.body) + literals(node.orelse)
    if isinstance(node, ast.BinOp):
        endings = literals(node.right) or ["{}"] if isinstance(node.op, ast.Add) else [""]
        return [left + right for left in literals(node.left) or ["{}"] for right in endings]
    return literals(node.func.value) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else []


def python_prose(path: str, source: str) -> Iterator[Prose]:
    """Yield the docstrings, messages, help texts, test names and comments of a Python file."""
    for node in ast.walk(ast.parse(source)):
        spots: list[tuple[str, ast.expr]] = []
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from docstrings(path, node)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            spots = [("message", value) for value in (*node.exc.args, *(word.value for word in node.exc.keywords))]
        elif isinstance(node, ast.Call):
            spots = [("help", word.value) for word in node.keywords if word.arg in HELP_WORDS]
            if PRINTER.search(ast.unparse(node.func)):
                spots += [("message", value) for value in node.args]
        for kind, value in spots:
            yield from (Prose(path, value.lineno, kind, text) for text in literals(value) if " " in text.strip())
    yield from comments(path, source)


def docstrings(path: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Prose]:
    """Yield the test name, the docstring and the attribute docstrings of a module, a class or a function."""
    name = Path(path).stem if isinstance(node, ast.Module) else node.name
    if name.startswith("test_"):
        yield Prose(path, getattr(node, "lineno", 1), "test", name)
    decorators = " ".join(ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))
    for before, statement in zip([None, *node.body], node.body, strict=False):
        value = statement.value if isinstance(statement, ast.Expr) else None
        if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
            continue
        if before is None or isinstance(before, (ast.Assign, ast.AnnAssign)):
            is_command = before is None and re.search(r"\b(?:command|group)\(", decorators)
            yield Prose(path, value.lineno, "command" if is_command else "docstring", value.value)


def comments(path: str, source: str) -> Iterator[Prose]:
    """Yield the comments of a Python file. Consecutive comment lines are one text."""
    lines: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            is_alone = not token.line[:column].strip()
            if not (is_alone and lines and number == last + 1):
                yield Prose(path, first, "comment", "\n".join(lines))
                lines, first = [], number
            lines.append("" if NOT_PROSE.match(text := token.string.lstrip("#: ")) else text.split("  # ")[0])
            last = number if is_alone else 0
    yield Prose(path, first, "comment", "\n".join(lines))


def markdown_prose(path: str, source: str) -> Iterator[Prose]:
    """Yield the paragraphs, list items, headings and table cells of a Markdown file, without code blocks."""
    lines: list[str] = []
    fence, first = "", 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        text = line.strip()
        if marker := re.match(r"`{3,}|~{3,}", text):
            fence = marker.group() if not fence else "" if text.startswith(fence) else fence
        text = "" if fence or marker else re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
        if lines and re.match(r"$|(?:[-*+>]|\d+[.)]|#+)\s|\|", text):
            yield Prose(path, first, "markdown", "\n".join(lines))
            lines = []
        if text.startswith(("|", "#")):
            cells = [] if re.fullmatch(r"[|:\- ]+", text) else re.split(r"(?<!\\)\|", text.strip("|# "))
            yield from (Prose(path, number, "markdown", cell) for cell in cells)
        elif text and not text.startswith("<"):
            first = first if lines else number
            lines.append(re.sub(r"^(?:[-*+>]|\d+[.)])\s+", "", text))


def sentences(prose: Prose) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each sentence, without literal blocks, examples and drawings."""
    lines = prose.text.split("\n")
    literal: int | None = None
    for index, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is not None or re.search(r"^\s*>>> |[\u2500-\u257f]", line):
            lines[index] = ""
        elif line.rstrip().endswith("::"):
            literal = indent
    text = "\n".join(lines)
    ends = sorted({match.end() for match in re.finditer(f"{PARAGRAPH_END}|{SENTENCE_END}", text)})
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        if re.search(r"[A-Za-z]{2}", part := text[start:end]):
            yield prose.line + text.count("\n", 0, end - len(part.lstrip())), " ".join(part.split())


def check(prose: Prose) -> Iterator[Hit]:
    """Yield the hits of all rules in one text."""
    if prose.kind == "test":
        if re.search(r"_what_|_who_|_that_is_", prose.text) or len(prose.text) > MAX_TEST_NAME:
            yield Hit(prose.path, prose.line, "test-name", prose.text)
        return
    for number, (line, sentence) in enumerate(sentences(prose)):
        text = CODE.sub("CODE", sentence)
        if prose.kind in ("help", "command") and number == 0 and HELP_OPENING.match(text):
            yield Hit(prose.path, line, "help", sentence)
        for rule, phrases in PHRASES.items():
            found = [
                (name, instead, match)
                for name, pattern, instead in phrases
                for match in re.finditer(pattern, text, re.IGNORECASE)
            ]
            if found and not (rule == "clause" and text.rstrip("\"')*").endswith("?")):
                names = tuple(name for name, _, _ in found)
                _, instead, match = found[0]
                yield Hit(prose.path, line, rule, sentence, names, instead, max(0, sentence.find(match.group())))
        if len(re.findall(r"[A-Za-z0-9]\S*", text)) > MAX_WORDS:
            yield Hit(prose.path, line, "long", sentence)
        if len(re.findall(r"(?<![\w$])\(|;", text)) > MAX_ASIDES:
            yield Hit(prose.path, line, "asides", sentence)
    if prose.kind in ("docstring", "command"):
        yield from check_summary(prose)


def check_summary(prose: Prose) -> Iterator[Hit]:
    """Yield a hit if the first line of a docstring is not a summary."""
    paragraph = re.split(r"\n[ \t]*\n", prose.text.strip())[0]
    first = paragraph.split("\n")[0]
    problems = {
        "no final period": not first.endswith((".", "!", "?")),
        f"over {MAX_SUMMARY} characters": len(first) > MAX_SUMMARY,
        "no summary": NOT_A_SUMMARY.match(first) and len(list(sentences(prose._replace(text=paragraph)))) > 1,
    }
    if any(problems.values()):
        yield Hit(prose.path, prose.line, "summary", first, tuple(name for name in problems if problems[name]))


def hits_in(paths: Iterable[Path]) -> Iterator[Hit]:
    """Yield the hits in all files, sorted by line within a file."""
    for path in paths:
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
        prose = (markdown_prose if path.suffix == ".md" else python_prose)(name, path.read_text("utf-8"))
        yield from sorted((hit for text in prose for hit in check(text)), key=lambda hit: (hit.line, hit.rule))


def report(hit: Hit, width: int = 110) -> str:
    """Return the line to print for a hit, with the part of the sentence around the phrase."""
    start = max(0, min(hit.at - width // 3, len(hit.sentence) - width))
    part = "…" * (start > 0) + hit.sentence[start : start + width] + "…" * (start + width < len(hit.sentence))
    return f"{hit.path}:{hit.line}: {hit.rule}: {part}" + (f" [say: {hit.instead}]" if hit.instead else "")


def tracked_files() -> list[Path]:
    """Return the Python and Markdown files of the repository that git tracks."""
    command = ["git", "-C", str(ROOT), "ls-files", "*.py", "*.md"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [ROOT / name for name in names if name != str(Path(__file__).relative_to(ROOT)) and (ROOT / name).is_file()]


def main() -> int:
    """Check the named files, or all files that git tracks, and return the exit status."""
    if sys.argv[1:] == ["--rules"]:
        print("\n".join(f"{name}: {text}" for name, text in RULES.items()))
        return 0
    hits = list(hits_in([Path(name) for name in sys.argv[1:]] or tracked_files()))
    sys.stdout.writelines(report(hit) + "\n" for hit in hits)
    if hits:
        print(f"{len(hits)} sentences are not plain English; `python .ci/words.py --rules` explains the rules")
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main())
