"""What was read of a mapped file is given back, and nothing else is touched."""

import mmap
import os

import pytest
import torch
from support.children import memory_of_process

from superadam.host.mapped_files import MappedFiles


def test_pages_of_a_mapped_file_are_given_back_and_read_again(tmp_path):
    values = torch.arange(4 << 20)
    torch.save({"values": values}, tmp_path / "file.pt")
    mapped = torch.load(tmp_path / "file.pt", mmap=True)["values"]
    assert torch.equal(mapped, values)
    before = memory_of_process("RssFile")
    MappedFiles().release(mapped)
    assert before - memory_of_process("RssFile") > 0.9 * values.nbytes
    assert torch.equal(mapped, values)


@pytest.mark.parametrize("name", [b"\xff", b"a\x0cb \x1c c"], ids=["no UTF-8", "separators of lines"])
def test_other_mapped_files_have_any_name(name, tmp_path):
    with open(os.fsencode(tmp_path) + b"/" + name, "w+b") as file:
        file.write(bytes(9))
        file.flush()
        with mmap.mmap(file.fileno(), 9):
            test_what_was_written_to_a_private_mapping_stays(tmp_path)


def test_what_was_written_to_a_private_mapping_stays(tmp_path):
    torch.save(torch.zeros(1 << 16), tmp_path / "file.pt")
    mapped = torch.load(tmp_path / "file.pt", mmap=True)
    mapped[::1000] = 1.0
    MappedFiles().release(mapped)
    assert mapped.sum() == 66


@pytest.mark.parametrize(
    "tensor", [torch.ones(1 << 16), torch.ones(300, 300).T, torch.ones(0), torch.ones(()), torch.ones(3, device="meta")]
)
def test_memory_that_maps_no_file_is_left_alone(tensor):
    MappedFiles().release(tensor)
    assert tensor.is_meta or torch.equal(tensor, torch.ones_like(tensor))
