"""Mistakes that a type checker must find. Each wrong line has a comment."""

from __future__ import annotations

import tieredckpt
from tieredckpt import Checkpointer, Settings, TieredReader, TieredWriter

print(tieredckpt.Nothing)  # WRONG
TieredWriter()  # WRONG
TieredWriter("tiered://j", step="3")  # WRONG
TieredReader("tiered://j", on_dtype_mismatch="ignore")  # WRONG
Checkpointer("tiered://j", "s3://bucket")  # WRONG
Checkpointer("tiered://j", on_busy="panic")  # WRONG
Checkpointer("tiered://j", evry=3)  # WRONG
ckpt = Checkpointer("tiered://j")
ckpt.save({"a": 1})  # WRONG
ckpt.save({"a": 1}, 1).wait("disk")  # WRONG
ckpt.restore()  # WRONG
Settings().enabled = False  # WRONG
Settings(enabled="no")  # WRONG
