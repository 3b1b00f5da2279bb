"""The types of what jaxckpt returns, for annotations. Programs do not create them."""

from __future__ import annotations

from jaxckpt._inspect.diff import Delta as Delta
from jaxckpt._inspect.diff import LeafDelta as LeafDelta
from jaxckpt._inspect.restore_plan import LeafLayout as LeafLayout
from jaxckpt._inspect.restore_plan import LeafPlan as LeafPlan
from jaxckpt._inspect.restore_plan import ProcessPlan as ProcessPlan
from jaxckpt._inspect.restore_plan import RestorePlan as RestorePlan
from jaxckpt._inspect.verify import VerifyReport as VerifyReport
from jaxckpt._local_tier.tier import LocalBytes as LocalBytes
from jaxckpt._pipeline.progress import Progress as Progress
from jaxckpt._restore.read_plan import ReadCost as ReadCost
from jaxckpt._run_folder.steps import Incident as Incident
from jaxckpt._save.running_saves import SaveInfo as SaveInfo
