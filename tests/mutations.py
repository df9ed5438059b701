"""Breaks named lines of the package, one at a time, and shows that the tests notice: `python -m tests.mutations`.

Each mutation is made in a copy of the repository and the tests named with it run there; they must fail. The list is
what docs/explanation/mutations.md tells. Takes some minutes; CI only checks that every line to break is still there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".nox", "__pycache__", "*output*", "lightning_logs", ".*cache", "site")


@dataclass(frozen=True)
class Mutation:
    """One line, what it becomes, and tests of which at least one must fail then."""

    name: str
    path: str
    line: str
    becomes: str
    tests: str
    """Arguments for pytest."""

    def applied_to(self, source: str) -> str:
        if source.count(self.line) != 1:
            raise ValueError(f"{self.name}: {self.path} has {source.count(self.line)} times {self.line!r}, not once")
        return source.replace(self.line, self.becomes)


DDP = "tests/strategy/test_ddp_equality.py"
STEP = "tests/strategy/test_train_step.py"
UNEVEN = "tests/loop/test_uneven_batches.py"
EXECUTOR = "tests/pipeline/test_executor.py"
PLAN = "tests/parallel/test_plan.py"

MUTATIONS = [
    Mutation(
        "gradients are not summed over ranks",
        "lightning_d9d/sync/buckets.py",
        "self.work = dist.all_reduce(flat, group=self.group, async_op=True)",
        "self.work = None",
        f"{DDP} -k four_ranks",
    ),
    Mutation(
        "gradients are divided twice",
        "lightning_d9d/sync/buckets.py",
        "flat[: self.num_elements].div_(divisor)",
        "flat[: self.num_elements].div_(divisor).div_(divisor)",
        f"{DDP} -k 'bitwise and adamw or four_ranks'",
    ),
    Mutation(
        "what other ranks used is skipped",
        "lightning_d9d/sync/buckets.py",
        "if flag and not self.used[index]:",
        "if flag < 0:",
        f"{DDP} -k unused_parameters",
    ),
    Mutation(
        "a bucket leaves with its first gradient",
        "lightning_d9d/sync/buckets.py",
        "len(bucket.arrived) == len(bucket.parameters)",
        "len(bucket.arrived) > 0",
        f"{DDP} -k 'bitwise and adamw' tests/sync/test_buckets.py",
    ),
    Mutation(
        "accumulated batches are forgotten in the total weight",
        "lightning_d9d/strategy/window.py",
        "if self.weight is None else self.weight + weight",
        "",
        f"{STEP} -k 'plain_torch and tokens'",
    ),
    Mutation(
        "the total weight is this rank's",
        "lightning_d9d/strategy/train_step.py",
        "                dist.all_reduce(message, group=report.group_or(self.group))",
        "                pass",
        f"{STEP} -k two_ranks_with_uneven",
    ),
    Mutation(
        "losses are scaled by this rank's weight",
        "lightning_d9d/strategy/loss_scale.py",
        "            dist.all_reduce(total, group=self._group)",
        "            pass",
        f"{STEP} -k two_ranks_with_uneven",
    ),
    Mutation(
        "a microbatch is run twice",
        "lightning_d9d/pipeline/executor.py",
        "            for action in actions:",
        "            for action in (*actions[:3], *actions[1:]):",
        f"{STEP} -k plain_torch",
    ),
    Mutation(
        "dummies count",
        "lightning_d9d/pipeline/executor.py",
        "return microbatch < self.num_counted",
        "return True",
        f"{EXECUTOR} -k dummies",
    ),
    Mutation(
        "the gradient of the loss is 1",
        "lightning_d9d/pipeline/executor.py",
        "factor = scale if self.batch.counts",
        "factor = 1.0 if self.batch.counts",
        f"{EXECUTOR} -k 'one_rank and trained'",
    ),
    Mutation(
        "split backwards announce their last one",
        "lightning_d9d/pipeline/executor.py",
        "isinstance(action, Backward) and not self.splits_backward",
        "isinstance(action, Backward)",
        f"{EXECUTOR} -k random",
    ),
    Mutation(
        "weight backwards are left out",
        "lightning_d9d/pipeline/stage.py",
        "            weights.accumulate()",
        "            pass",
        f"{EXECUTOR} -k 'one_rank and trained'",
    ),
    Mutation(
        "inputs are kept after their backward",
        "lightning_d9d/pipeline/stage.py",
        "live.edges, live.inputs = [], []",
        "live.edges = []",
        "tests/pipeline/test_executor_memory.py -k 'kept and shared'",
    ),
    Mutation(
        "gradients share memory",
        "lightning_d9d/pipeline/stage.py",
        "        _keep_apart(first,",
        "        (first,",
        "tests/pipeline/test_handing_over.py -k one_memory",
    ),
    Mutation(
        "schemas are not compared",
        "lightning_d9d/pipeline/transfer.py",
        "        elif known != schema:",
        "        elif False:",
        "tests/pipeline/test_handing_over.py -k refused",
    ),
    Mutation(
        "receives wait in front of what runs",
        "lightning_d9d/schedule/communications.py",
        "return position if position < len(spans) and spans[position].start < time else position - 1",
        "return position - 1",
        "tests/schedule/test_table.py -k messages",
    ),
    Mutation(
        "units divide their sums",
        "lightning_d9d/parallel/data.py",
        "            unit.set_gradient_divide_factor(1.0)",
        "            unit.set_gradient_divide_factor(2.0)",
        "tests/parallel/test_data.py -k sums_over_microbatches",
    ),
    Mutation(
        "copies of experts are not summed",
        "lightning_d9d/parallel/plan.py",
        "Axis.EP_REPLICATE: Summed.IN_BUCKETS",
        "Axis.EP_REPLICATE: Summed.WITH_TOKENS",
        f"{PLAN} -k ranks_sum",
    ),
    Mutation(
        "whole parameters are not summed over tensor ranks",
        "lightning_d9d/parallel/plan.py",
        "Axis.CP: Summed.IN_BUCKETS, Axis.TP: Summed.IN_BUCKETS}",
        "Axis.CP: Summed.IN_BUCKETS, Axis.TP: Summed.WITH_TOKENS}",
        f"{PLAN} -k 'ranks_sum and tp4'",
    ),
    Mutation(
        "copies of shared heads are not summed",
        "lightning_d9d/parallel/plan.py",
        "Axis.TP_REPLICATE: Summed.IN_BUCKETS",
        "Axis.TP_REPLICATE: Summed.WITH_TOKENS",
        f"{PLAN} -k 'ranks_sum and tp4'",
    ),
    Mutation(
        "shards are not summed over tensor ranks",
        "lightning_d9d/strategy/data_parallel.py",
        "        dist.all_reduce(message, group=group)",
        "        pass",
        f"{PLAN} -k 'ranks_sum and shard2 and tp2'",
    ),
    Mutation(
        "early queries attend to later ranks",
        "lightning_d9d/parallel/context.py",
        "rows = slice(self._half if ranks.start > self.rank else 0, None)",
        "rows = slice(None)",
        "tests/parallel/test_context.py -k two_ranks",
    ),
    Mutation(
        "positions are counted within a rank",
        "lightning_d9d/parallel/tokens.py",
        "return self.sequence.positions(slice_length * self.num_slices, device).unsqueeze(0)",
        "return torch.arange(slice_length * self.num_slices, device=device).unsqueeze(0)",
        "tests/meshes/test_equality.py -k 'cp2 and heads2x2 and not context'",
    ),
    Mutation(
        "each rank has its own loss of the routers",
        "lightning_d9d/models/qwen3_moe/model.py",
        "else self.tokens.mean(router_loss)",
        "else router_loss",
        "tests/models/test_qwen3_moe_balance.py -k 'two_ranks and context'",
    ),
    Mutation(
        "means are over this rank's tokens",
        "lightning_d9d/models/qwen3_moe/states.py",
        "totals = self._tokens.sum(torch.cat([sums.flatten(1), count], 1))",
        "totals = torch.cat([sums.flatten(1), count], 1)",
        "tests/models/test_qwen3_moe_states.py -k 'mesh and cp2'",
    ),
    Mutation(
        "whole states are in the order of ranks",
        "lightning_d9d/parallel/tokens.py",
        "return self.sequence.join(gather_dim(chunks, dim, self.context_group), dim)",
        "return gather_dim(chunks, dim, self.context_group)",
        "tests/models/test_qwen3_moe_states.py -k 'mesh and cp2'",
    ),
    Mutation(
        "gradients of sums are summed over tensor ranks",
        "lightning_d9d/parallel/tokens.py",
        "x = sum_over(x, self.tensor_group, sums_gradients=False)",
        "x = sum_over(x, self.tensor_group, sums_gradients=True)",
        "tests/models/test_qwen3_moe_states.py -k 'mesh and tp2'",
    ),
    Mutation(
        "gradients of sums are not summed over chunks",
        "lightning_d9d/parallel/tokens.py",
        "x = sum_over(x, self.context_group, sums_gradients=True)",
        "x = sum_over(x, self.context_group, sums_gradients=False)",
        "tests/models/test_qwen3_moe_states.py -k 'mesh and cp2'",
    ),
    Mutation(
        "a unit leaves out what this rank did not use",
        "lightning_d9d/parallel/fsdp.py",
        "        if each.sharded_param in reduced and each.unsharded_accumulated_grad is None:",
        "        if False:",
        "tests/strategy/test_fully_sharded.py -k part_of_a_block",
    ),
    Mutation(
        "documents attend to earlier ones",
        "lightning_d9d/ops/attention.py",
        "documents[:, None, :, None] == documents[:, None, None, :]",
        "documents[:, None, :, None] >= documents[:, None, None, :]",
        "tests/models/test_qwen3_moe_documents.py -k packed_rows_equal",
    ),
    Mutation(
        "later stages get no document ids",
        "lightning_d9d/models/qwen3_moe/module.py",
        'optional = ("position_ids", "document_ids", "pooling_mask")',
        'optional = ("position_ids", "pooling_mask")',
        "tests/models/test_qwen3_moe_documents.py -k pipeline",
    ),
    Mutation(
        "an expert's copies of different blocks share rows",
        "lightning_d9d/ops/kernels/moe_permute.py",
        "before += tl.where(blocks < first_block, values, 0)",
        "before += tl.where(blocks < 0, values, 0)",
        "tests/ops/test_moe_permute.py -k rows_are_in_order",
    ),
    Mutation(
        "tokens go to a rank once for each of their experts there",
        "lightning_d9d/ops/moe_ranks.py",
        "return torch.where(is_equal.tril(-1).any(2), num_ranks, ranks).int()",
        "return ranks.int()",
        "tests/modules/test_dispatch.py",
    ),
    Mutation(
        "tied parameters are not summed",
        "lightning_d9d/strategy/data_parallel.py",
        "BucketGroup([], shared.group)",
        "BucketGroup([], None)",
        "tests/strategy/test_pipeline.py -k 'two_stages and gpipe'",
    ),
    Mutation(
        "tied parameters count on every stage in the norm",
        "lightning_d9d/strategy/tied.py",
        "if parameter not in self or self[parameter].counts_here]",
        "]",
        "tests/strategy/test_pipeline.py -k 'two_stages and gpipe'",
    ),
    Mutation(
        "validation weighs batches alike",
        "lightning_d9d/strategy/module.py",
        "batch_size=weight,",
        "batch_size=1,",
        "tests/strategy/test_module.py -k exact_over_batches",
    ),
    Mutation(
        "replicas begin with their own weights",
        "lightning_d9d/strategy/replicas.py",
        "        self._broadcast(tensors)",
        "        pass",
        f"{DDP} -k begin_as_rank_0",
    ),
    Mutation(
        "buffers stay each rank's own",
        "lightning_d9d/strategy/replicas.py",
        "            self._broadcast(shared_buffers(self.module))",
        "            pass",
        f"{DDP} -k 'bitwise and norm'",
    ),
    Mutation(
        "every data rank reads the same rows",
        "lightning_d9d/strategy/rank_hooks.py",
        '"rank": self.ranks.dp_rank}',
        '"rank": 0}',
        f"{DDP} -k 'bitwise and adamw' tests/strategy/test_configuration.py",
    ),
    Mutation(
        "experts leave out tensor-parallel ranks",
        "lightning_d9d/mesh/config.py",
        "Axis.EP_REPLICATE: self.world_size // pp // ep,",
        "Axis.EP_REPLICATE: self.world_size // pp // ep // tp,",
        "tests/mesh/test_config.py tests/mesh/test_domains.py",
    ),
    Mutation(
        "equal axes get groups of their own",
        "lightning_d9d/mesh/groups.py",
        "        if key not in self._by_key:",
        "        if True:",
        "tests/mesh/test_groups.py",
    ),
    Mutation(
        "means of ranks without data count",
        "lightning_d9d/strategy/loss_scale.py",
        "num_counting = (plan.num_counting or self._num_ranks // self._num_chunks) * self._num_chunks",
        "num_counting = self._num_ranks",
        f"{UNEVEN} -k 'three_and_five and mean'",
    ),
    Mutation(
        "states of loaders are kept when their end was read",
        "lightning_d9d/loop/uneven.py",
        "self._history[-1].states if plan.is_dummy else states",
        "states",
        f"{UNEVEN} -k 'in_the_middle and counted'",
    ),
    Mutation(
        "ranks end their epochs alone",
        "lightning_d9d/coordination/watchdog.py",
        '        self._meet("epoch")',
        "        pass",
        "tests/loop/test_uneven_data.py -k without_a_word",
    ),
    Mutation(
        "weights are copied before the partner has mixed the earlier ones",
        "lightning_d9d/mixing/pushes.py",
        "        self._hear(partner, _FREE)",
        "        pass",
        "tests/mixing/test_pushes.py -k ahead",
    ),
    Mutation(
        "weights change before they have left",
        "lightning_d9d/mixing/mixer.py",
        "                message.settle()",
        "                pass",
        "tests/mixing/test_pushes.py -k they_have_left",
    ),
    Mutation(
        "what a run replaced stays on its Trainer",
        "lightning_d9d/loop/patches.py",
        "self._undo.close()",
        "self._undo.pop_all()",
        "tests/loop/test_patches.py -k one_process",
    ),
    Mutation(
        "bad steps are taken",
        "lightning_d9d/strategy/optimizer_step.py",
        "if skip is not None and not on_device and skip.item():",
        "if False:",
        "tests/strategy/test_optimizer_step.py",
    ),
    Mutation(
        "the norm forgets one of two axes",
        "lightning_d9d/sync/norm.py",
        "        for group in groups:",
        "        for group in groups[:1]:",
        "tests/sync/test_norm.py -k four_ranks",
    ),
    Mutation(
        "copies count several times in the norm",
        "lightning_d9d/sync/norm.py",
        "enumerate(placements) if not placement.is_replicate()]",
        "enumerate(placements)]",
        "tests/sync/test_norm.py -k four_ranks",
    ),
    Mutation(
        "a stage's norm is its own",
        "lightning_d9d/sync/norm.py",
        "    if pipeline_group is not None:",
        "    if False:",
        "tests/sync/test_norm.py -k stage",
    ),
    Mutation(
        "who has no gradient sends nothing for the norm",
        "lightning_d9d/sync/norm.py",
        "by_sharding.setdefault(sharding, [])",
        "by_sharding.setdefault(sharding, []) if gradient is not None else []",
        "tests/sync/test_norm.py -k send_alike",
    ),
    Mutation(
        "the norm is summed in bfloat16",
        "lightning_d9d/sync/norm.py",
        "wide = torch.float32 if dtype.itemsize < 4 else None",
        "wide = None",
        "tests/sync/test_norm.py -k bfloat16",
    ),
    Mutation(
        "the maximum loses NaN",
        "lightning_d9d/sync/norm.py",
        "bits = part.view(torch.int64) & torch.iinfo(torch.int64).max",
        "bits = part",
        "tests/sync/test_norm.py -k of_one_rank",
    ),
    Mutation(
        "meshes and plain tensors share a group",
        "lightning_d9d/optim/groups.py",
        "parameter.device_mesh if isinstance(parameter, DTensor) else None",
        "None",
        "tests/optim/test_groups.py -k meshes",
    ),
    Mutation(
        "the factor of division and clipping is lost",
        "lightning_d9d/strategy/optimizer_step.py",
        "optimizer.grad_scale = None if factor is None else 1 / factor",
        "optimizer.grad_scale = None",
        "tests/strategy/test_one_factor.py -k one_process",
    ),
    Mutation(
        "tensor-parallel copies may differ",
        "lightning_d9d/strategy/sharding.py",
        "_check_copies(plain, mesh)",
        "pass",
        "tests/strategy/test_sharded.py -k refused",
    ),
    Mutation(
        "resumed runs draw other random numbers",
        "lightning_d9d/strategy/epoch_place.py",
        'set_random_state(resumed["random"], self._ranks.device)',
        "pass",
        "tests/strategy/test_sharded.py -k bit_for_bit",
    ),
    Mutation(
        "resumed loaders begin with the first batch",
        "lightning_d9d/data/resume.py",
        "self._resumed = state if is_within else None",
        "pass",
        "tests/data/test_resume.py",
    ),
    Mutation(
        "optimizer state of directories is left out",
        "lightning_d9d/strategy/loading.py",
        "load_optimizer_state(optimizer, state.names, OPTIMIZER.format(index), opened)",
        "pass",
        "tests/strategy/test_sharded.py -k another_mesh",
    ),
    Mutation(
        "parameters of stages come in the order of ranks",
        "lightning_d9d/checkpoint/whole.py",
        "return sorted(num_holders.keys() & places.keys(), key=places.__getitem__)",
        "return [name for name in num_holders if name in places]",
        "tests/checkpoint/test_whole.py",
    ),
    Mutation(
        "one rank writes all files of an export",
        "lightning_d9d/state/writer.py",
        "key=lambda rank: (num_written[rank], -held[rank], rank)",
        "key=lambda rank: rank",
        "tests/state/test_stream.py -k all_ranks",
    ),
    Mutation(
        "all large tensors are in memory at once",
        "lightning_d9d/state/reader.py",
        "with two_at_a_time if num_bytes[name] > _LARGE_BYTES else nullcontext():",
        "with nullcontext():",
        "tests/state/test_stream.py -k take_turns",
    ),
    Mutation(
        "copies of shards begin with their own weights",
        "lightning_d9d/strategy/sharding.py",
        "by_group.setdefault(mesh.get_group(axis), []).append(tensor.to_local())",
        "pass",
        "tests/strategy/test_sharded.py -k begin_equal",
    ),
    Mutation(
        "checksums of tensors are not compared",
        "lightning_d9d/checkpoint/tensors.py",
        "if left or checksum != expected:",
        "if left:",
        "tests/checkpoint/test_failures.py -k flipped",
    ),
    Mutation(
        "background saves write tensors as they are later",
        "lightning_d9d/checkpoint/background.py",
        "pieces.pieces = self._copies.of(pieces.pieces)",
        "pass",
        "tests/checkpoint/test_background.py -k meanwhile",
    ),
    Mutation(
        "background saves do not keep the older checkpoint meanwhile",
        "lightning_d9d/strategy/saving.py",
        "self._background.submit(functools.partial(self._remove, path, io), path, exists=False)",
        "self._remove(path, io)",
        "tests/strategy/test_asynchronous.py -k older",
    ),
    Mutation(
        "checkpoints are saved inside of accumulation windows",
        "lightning_d9d/strategy/checkpoints.py",
        "if self.saves.is_inside_of_window:",
        "if False:",
        "tests/strategy/test_resume_loaders.py -k window",
    ),
    Mutation(
        "an epoch after a resumed end is not counted",
        "lightning_d9d/strategy/epoch_place.py",
        "fit_loop.reset_restart_stage()",
        "pass",
        "tests/strategy/test_resume.py -k again_in",
    ),
    Mutation(
        "what is left of an epoch is dealt out from its beginning",
        "lightning_d9d/data/resume.py",
        'left = indices[order["first_sample"] :]',
        "left = indices[:]",
        "tests/data/test_resume.py -k dealt",
    ),
    Mutation(
        "files are written in place",
        "lightning_d9d/strategy/checkpoint_files.py",
        'with open(owner.hidden("partial"), "xb") as file',
        'with open(path, "wb") as file',
        "tests/strategy/test_faults.py -k 'disk'",
    ),
    Mutation(
        "adapters take the host no time",
        "lightning_d9d/schedule/layers.py",
        "number * adapter.of(layer)",
        "0 * adapter.of(layer)",
        "tests/schedule/test_tune.py -k by_hand",
    ),
    Mutation(
        "Auto forgets the host",
        "lightning_d9d/schedule/tune.py",
        "max(1.0, host[rank] / device[rank])",
        "1.0",
        "tests/schedule/test_tune.py -k slower",
    ),
    Mutation(
        "actions of a pair share random numbers",
        "lightning_d9d/pipeline/turns.py",
        "            self._take_state(own)\n",
        "",
        "tests/pipeline/test_turns.py -k random_numbers",
    ),
    Mutation(
        "an action goes on after the other has failed",
        "lightning_d9d/pipeline/turns.py",
        "            raise _Stopped\n",
        "            return\n",
        "tests/pipeline/test_turns.py -k failure",
    ),
]


def is_noticed(mutation: Mutation) -> bool:
    """Whether a test fails in a copy of the repository with the line broken."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        path = copy / mutation.path
        path.write_text(mutation.applied_to(path.read_text()))
        command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider -m 'not meshes' {mutation.tests}"
        environment = os.environ | {"PYTHONPATH": str(copy)}
        result = subprocess.run(command, shell=True, cwd=copy, env=environment, capture_output=True, text=True)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest ended with {result.returncode}\n{result.stdout}{result.stderr}")
    return result.returncode == 1


def main(words: list[str]) -> int:
    """Check the mutations whose names contain all words."""
    missed = 0
    for mutation in MUTATIONS:
        if all(word in mutation.name for word in words):
            noticed = is_noticed(mutation)
            missed += not noticed
            print(f"{'noticed' if noticed else 'MISSED '}  {mutation.name}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
