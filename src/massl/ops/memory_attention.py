"""The memory loss of MaSSL, computed as attention over the memory.

For a student embedding z, a teacher embedding w and a block of memory rows m_k, the cross-entropy between the two
softmaxes is

    - sum_k q_k log softmax(m z / tau_s)_k  =  logsumexp_k(m_k . z / tau_s)  -  z . c / tau_s ,      c = sum_k q_k m_k

with q = softmax(m w / tau_t). The centre c is attention with query w and keys = values = the block. The logsumexp is
the statistic that flash attention computes for query z, and its gradient is the attention output of z, divided by
tau_s. So one attention *forward* per network gives the value and the gradient, and the [samples x views, memory] logits
are never stored: the memory can hold millions of rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from massl.ops.view_losses import check_shapes, check_temperatures, num_different_pairs

# Logits held at once without a fused kernel: 2**26 float32 = 256 MiB.
_MAX_LOGITS = 1 << 26
_FLASH_MAX_DIM = 256
_FLASH_TILE = 128  # queries per thread block of the flash kernel


def memory_loss(
    student: Tensor,
    teacher: Tensor,
    blocks: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float | Tensor,
    shared_views: bool = True,
    operand_dtype: torch.dtype | None = None,
) -> Tensor:  # [V, N, D], [T, N, D], [B, N_b, D] -> []
    """Make each student view agree with each *other* teacher view on which memory rows it resembles (Silva et al.).

    Equals `memory_loss_reference`: for every block, view v and teacher view t != v, the cross-entropy between the
    softmax over cosine similarities of the teacher view (target) and of the student view; averaged over pairs, samples
    and blocks. All inputs are L2-normalised; teacher view t is the same crop as student view t. Only the student
    receives a gradient. With `shared_views` false the networks see different crops, and all pairs of views count.

    `operand_dtype` is the type of the attention operands (sums are float32), by default that of `student`. In bfloat16
    on a GPU the fused attention kernel is used. The teacher's temperature may be a tensor, which a CUDA graph rereads.
    """
    temperatures = (student_temperature, teacher_temperature)
    return _loss_and_entropy(student, teacher, blocks, *temperatures, shared_views, operand_dtype, False)[0]


def memory_loss_and_entropy(
    student: Tensor,
    teacher: Tensor,
    blocks: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float | Tensor,
    shared_views: bool = True,
    operand_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # as memory_loss -> [], []
    """`memory_loss`, and from the same attention the mean entropy in nats of the teacher's softmaxes, no gradient."""
    temperatures = (student_temperature, teacher_temperature)
    loss, entropy = _loss_and_entropy(student, teacher, blocks, *temperatures, shared_views, operand_dtype, True)
    assert entropy is not None
    return loss, entropy


def memory_loss_reference(
    student: Tensor,
    teacher: Tensor,
    blocks: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float,
    shared_views: bool = True,
) -> Tensor:  # [V, N, D], [T, N, D], [B, N_b, D] -> []
    """The plain version of `memory_loss`: all logits, one cross-entropy per pair of views."""
    _check_inputs(student, teacher, blocks, student_temperature, teacher_temperature, shared_views)
    blocks = blocks.detach()
    targets = torch.softmax(torch.einsum("tnd,bkd->tbnk", teacher.detach(), blocks) / teacher_temperature, dim=-1)
    log_predictions = torch.log_softmax(torch.einsum("vnd,bkd->vbnk", student, blocks) / student_temperature, dim=-1)
    pairs = [(v, t) for v in range(student.shape[0]) for t in range(teacher.shape[0]) if v != t or not shared_views]
    return torch.stack([-(targets[t] * log_predictions[v]).sum(dim=-1).mean() for v, t in pairs]).mean()


def attend(
    queries: Tensor, blocks: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:  # [R, D], [B, N_b, D] -> [R, D], [R] float32
    """Softmax-weighted mean of a block's rows and logsumexp of the similarities, averaged over blocks; no gradient."""
    return _attend((queries.float() / temperature).to(queries.dtype), blocks)


def block_entropy(queries: Tensor, blocks: Tensor, temperature: float) -> Tensor:  # [R, D], [B, N_b, D] -> []
    """Mean entropy in nats of each query's softmax over each block: 0 if one row takes all, ln N_b if all are equal."""
    means, logsumexps = attend(queries, blocks, temperature)
    return (logsumexps - (queries.float() * means).sum(dim=-1) / temperature).mean()


def _loss_and_entropy(
    student: Tensor,
    teacher: Tensor,
    blocks: Tensor,
    student_temperature: float,
    teacher_temperature: float | Tensor,
    shared_views: bool,
    operand_dtype: torch.dtype | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    temperatures = (student_temperature, teacher_temperature)
    _check_inputs(student, teacher, blocks, *temperatures, shared_views)
    dtype = operand_dtype or student.dtype
    # Autocast would also round the sums of centres: a gradient off by 0.2 %.
    with torch.autocast(student.device.type, enabled=False):
        loss, entropy = _MemoryLoss.apply(student, teacher, blocks, *temperatures, shared_views, dtype, with_entropy)
    return loss, entropy


class _MemoryLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        blocks: Tensor,
        student_temperature: float,
        teacher_temperature: float | Tensor,
        shared_views: bool,
        dtype: torch.dtype,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        num_views, num_samples, dim = student.shape
        num_teacher_views = teacher.shape[0]
        # Temperatures divide the queries, so both networks share one attention call.
        queries = torch.cat([student.float() / student_temperature, teacher.float() / teacher_temperature]).reshape(
            -1, dim
        )
        outputs, all_logsumexps = _attend(queries.to(dtype), blocks.to(dtype))
        num_student = num_views * num_samples
        means, centres, logsumexps = outputs[:num_student], outputs[num_student:], all_logsumexps[:num_student]

        # is_pair[v, t]: student view v is compared with teacher view t. A view is never its own target.
        is_pair = torch.ones(num_views, num_teacher_views, device=student.device)
        num_pairs = num_views * num_teacher_views
        if shared_views:
            is_pair.fill_diagonal_(0.0)
            num_pairs = num_different_pairs(num_views, num_teacher_views)
        num_terms = num_pairs * num_samples
        view_weight = is_pair.sum(dim=1)[:, None]  # [V, 1] teacher views that view v is compared with
        target = (is_pair @ centres.reshape(num_teacher_views, -1)).reshape(student.shape)  # sum of centres over those

        embeddings = student.float()
        attraction = (embeddings * target).sum(dim=-1) / student_temperature
        loss = (view_weight * logsumexps.reshape(num_views, num_samples) - attraction).sum() / num_terms
        if ctx.needs_input_grad[0]:
            gradient = view_weight[:, :, None] * means.reshape(student.shape) - target
            ctx.save_for_backward((gradient / (student_temperature * num_terms)).to(student.dtype))
        if not with_entropy:
            return loss, None
        teacher_logsumexps, similarities = all_logsumexps[num_student:], queries[num_student:] * centres
        entropy = (teacher_logsumexps - similarities.sum(dim=-1)).mean()
        ctx.mark_non_differentiable(entropy)
        return loss, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor | None) -> tuple[Tensor | None, *tuple[None, ...]]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_loss).to(gradient.dtype), None, None, None, None, None, None, None


def _attend(queries: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:  # [R, D], [B, N_b, D] -> [R, D], [R]
    """`attend` for queries already divided by their temperature."""
    if not _can_fuse(queries):
        return _plain_attention(queries, blocks)
    return _flash_attention_on_gpu(queries, blocks) if queries.is_cuda else _flash_attention_on_cpu(queries, blocks)


def _can_fuse(queries: Tensor) -> bool:
    if queries.shape[-1] > _FLASH_MAX_DIM or queries.shape[-1] % 8:
        return False
    if queries.device.type == "cpu":
        return queries.dtype in (torch.float32, torch.bfloat16)
    is_supported = queries.device.type == "cuda" and torch.cuda.get_device_capability(queries.device)[0] >= 8
    return is_supported and queries.dtype in (torch.float16, torch.bfloat16)


def _flash_attention_on_cpu(queries: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks, rows = len(blocks), blocks[:, None]
    query = queries.expand(num_blocks, 1, *queries.shape)
    outputs, logsumexps = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, rows, rows, scale=1.0)
    return outputs[:, 0].float().mean(dim=0), logsumexps.reshape(num_blocks, -1).float().mean(dim=0)


def _flash_attention_on_gpu(queries: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Each block in parts, so that a few hundred queries fill the GPU; their logsumexps join the parts."""
    from massl.ops.kernels.memory import join_parts  # imported here: needs Triton, which only GPU builds have

    num_blocks, block_size, dim = blocks.shape
    num_parts = _parts_of_block(len(queries), num_blocks, block_size)
    rows = blocks.reshape(num_blocks * num_parts, 1, block_size // num_parts, dim)
    query = queries.expand(len(rows), 1, *queries.shape)
    if torch.cuda.get_device_capability(queries.device) == (9, 0) and torch.version.hip is None:
        # On Hopper cuDNN's kernel is twice as fast (0.10 against 0.22 ms for 896 queries and 65,536 rows). On other
        # cards it does not always support 256 dimensions.
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        outputs, logsumexps = attention(query, rows, rows, None, True, scale=1.0)[:2]
    else:
        outputs, logsumexps = torch.ops.aten._scaled_dot_product_flash_attention(query, rows, rows, scale=1.0)[:2]
    return join_parts(outputs[:, 0].contiguous(), logsumexps.reshape(len(rows), -1), num_blocks)


def _parts_of_block(num_queries: int, num_blocks: int, block_size: int) -> int:
    """Enough parts to fill the 132 multiprocessors of an H100 with tiles, but none shorter than 512 rows."""
    num_tiles = -(-num_queries // _FLASH_TILE) * num_blocks
    num_parts = 1
    while (
        num_tiles * num_parts < 132 * 3 // 4
        and block_size % (2 * num_parts) == 0
        and block_size // (2 * num_parts) >= 512
    ):
        num_parts *= 2
    return num_parts


def _plain_attention(queries: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    means = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
    logsumexps = torch.empty(queries.shape[0], dtype=torch.float32, device=queries.device)
    for rows in _query_chunks(queries.shape[0], blocks.shape[1]):
        mean_of_rows, logsumexp_of_rows = torch.zeros_like(means[rows]), torch.zeros_like(logsumexps[rows])
        for block in blocks:
            logits = (queries[rows] @ block.T).float()
            mean_of_rows += torch.softmax(logits, dim=-1).to(block.dtype) @ block
            logsumexp_of_rows += torch.logsumexp(logits, dim=-1)
        means[rows], logsumexps[rows] = mean_of_rows / len(blocks), logsumexp_of_rows / len(blocks)
    return means, logsumexps


def _query_chunks(num_queries: int, block_size: int) -> Iterator[slice]:
    chunk = max(1, _MAX_LOGITS // block_size)
    for start in range(0, num_queries, chunk):
        yield slice(start, start + chunk)


def _check_inputs(
    student: Tensor,
    teacher: Tensor,
    blocks: Tensor,
    student_temperature: float,
    teacher_temperature: float | Tensor,
    shared_views: bool,
) -> None:
    check_shapes(
        {
            "student": (student, "views samples dim"),
            "teacher": (teacher, "teacher_views samples dim"),
            "blocks": (blocks, "blocks rows dim"),
        }
    )
    if shared_views:
        num_different_pairs(len(student), len(teacher))
    check_temperatures(student_temperature, teacher_temperature)
