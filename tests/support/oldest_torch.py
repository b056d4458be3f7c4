"""Skip marks for features that torch 2.7, the oldest supported version, lacks."""

import pytest
import torch

OLDEST = torch.__version__.startswith("2.7.")

without_collectives = pytest.mark.skipif(OLDEST, reason="torch 2.7: dcp.save has no use_collectives")
without_first_rank = pytest.mark.skipif(OLDEST, reason="torch 2.7: DCP looks for rank 0 in each process group")
worlds_that_end = pytest.mark.skipif(OLDEST, reason="torch 2.7: a gloo group joins its thread while it holds the GIL")
replicas_on_gloo = pytest.mark.skipif(OLDEST, reason="torch 2.7: FSDP2's replicas need ReduceOp.AVG, gloo has none")
