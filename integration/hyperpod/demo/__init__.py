"""``make demo-hyperpod``: a job under real agents and our operator, and the proof that no bit of what happens shows."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from elastic.demo import shared_memory, show, summary_of, undisturbed
from elastic.demo.story import losses_of
from integration.hyperpod.demo.story import HyperPodStory
from tieredckpt.demo import emptied, kept_environ
from tieredckpt.demo.bucket import local_bucket


def main(*, as_json: bool = False, keep: Path | None = None) -> int:
    """Run it; 0 when every loss and the final state were equal bit for bit. ``keep`` is where its files stay."""
    if importlib.util.find_spec("hyperpod_elastic_agent") is None:
        print("the agent is not there: pip install --no-deps hyperpod-elastic-agent", file=sys.stderr)
        return 2
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    keep = emptied(keep or Path(tempfile.gettempdir()) / f"hyperpod-demo-{os.getuid()}")
    began = time.monotonic()
    with contextlib.ExitStack() as cleanup:
        room = Path(cleanup.enter_context(shared_memory()))
        bucket = cleanup.enter_context(local_bucket(keep))
        environ = {
            **kept_environ("ELASTIC_", "HYPERPOD_"),
            **bucket.environ,
            "TIEREDCKPT_DURABLE_URL": bucket.url,
            "TIEREDCKPT_AGENT_BUDGET": "512MiB",
            "PYTHONWARNINGS": "ignore",
        }
        console.print("[bold]a HyperPodPyTorchJob under hyperpodrun and our operator, and things happen to it[/]")
        story = cleanup.enter_context(contextlib.closing(HyperPodStory(keep, room, environ, console.print)))
        story.play()
        console.print((keep / "operator-0.log").read_text().rstrip(), markup=False)
        losses = losses_of(story.told("step"))
        console.print(f"[bold]the same {len(losses)} steps on one process, undisturbed; then from the bucket alone[/]")
        alone = undisturbed(keep, room, len(losses), environ, console.print)
        summary = summary_of(story, losses, alone, time.monotonic() - began)
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            show(console, story.acts, losses, summary)
            verdict = "[bold green]equal bit for bit[/]" if summary["equal"] else "[bold red]NOT equal[/]"
            console.print(f"{summary['steps']} losses compared: {verdict}, in {summary['seconds']:.0f} s")
            console.print(f"what agents and ranks have printed: {story.place.folder / 'pods'}")
    return 0 if summary["equal"] else 1
