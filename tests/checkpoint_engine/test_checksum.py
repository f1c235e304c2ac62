import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.checkpoint_engine.checksum import combine, copy_with_digest, tensor_digest


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {f"t{i}": torch.randn(3, 5, generator=generator).to(torch.bfloat16) for i in range(6)}


def checksum(named):
    return combine([tensor_digest(name, tensor) for name, tensor in named])


@given(st.permutations(range(6)))
def test_the_order_of_tensors_does_not_matter(order):
    items = list(tensors().items())
    assert checksum([items[i] for i in order]) == checksum(items)


@pytest.mark.parametrize("change", ["drop", "double", "value", "name", "shape", "dtype", "swap"])
def test_every_accident_changes_it(change):
    before = tensors()
    after = list(before.items())
    if change == "drop":
        after.pop(2)
    elif change == "double":
        after += [after[2], after[2]]
    elif change == "value":
        flipped = after[2][1].clone()
        flipped.view(torch.int16)[1, 1] ^= 1  # the lowest bit of one number
        after[2] = (after[2][0], flipped)
    elif change == "name":
        after[2] = ("other", after[2][1])
    elif change == "shape":
        after[2] = (after[2][0], after[2][1].reshape(5, 3))
    elif change == "dtype":
        after[2] = (after[2][0], after[2][1].view(torch.float16))
    else:
        after[1], after[2] = (after[1][0], after[2][1]), (after[2][0], after[1][1])
    assert checksum(after) != checksum(before.items())


def test_scalars_and_empty_tensors_have_a_digest():
    assert tensor_digest("s", torch.tensor(1.5)) != tensor_digest("s", torch.tensor(2.5))
    assert tensor_digest("e", torch.zeros(0, 4)) != tensor_digest("e", torch.zeros(4, 0))


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (640, 513)])  # the last one: several blocks and a rest
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strided", [False, True])
def test_a_copy_has_the_digest_of_what_travelled(shape, held, strided):
    source, target = torch.randn(*shape, 2).to(torch.bfloat16), torch.zeros(*shape, 2, dtype=held)
    source, target = (t[..., 1] if strided else t[..., 1].contiguous() for t in (source, target))
    assert copy_with_digest("t", source, target, torch.bfloat16) == tensor_digest("t", source)
    assert torch.equal(target.to(torch.bfloat16), source)


def test_a_copy_that_loses_bits_has_another_digest():
    source = torch.full((640, 513), 1 + 2**-7).to(torch.bfloat16)
    target = torch.zeros(source.shape, dtype=torch.float8_e4m3fn)
    assert copy_with_digest("t", source, target, torch.bfloat16) != tensor_digest("t", source)
