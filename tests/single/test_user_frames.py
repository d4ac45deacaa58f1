"""single: which files of a traceback count as the user's."""

import contextlib
import sys
import sysconfig
import traceback
from pathlib import Path

import pytest
import torch

import headway
from headway.user_frames import innermost_user_frame, is_project_file, is_user_file

HEADWAY = Path(headway.__file__).parent


@pytest.mark.parametrize(
    ("file", "given", "own"),
    [
        # Folders and packages of users that are only called like ours.
        ("/home/ann/headway/model.py", True, True),
        ("/home/ann/torch/train.py", True, True),
        (f"{HEADWAY}_extra/model.py", True, True),
        (f"{Path(torch.__file__).parent}vision_own/model.py", True, None),
        (f"{sysconfig.get_path('purelib')}/transformers/models/gpt2.py", True, False),
        (f"{HEADWAY}/workloads/cosmoflow.py", True, None),
        (f"{HEADWAY}/parallel/stages.py", False, False),
        (f"{HEADWAY}/run/executor.py", False, False),
        (torch.nn.__file__, False, False),
        (contextlib.__file__, False, False),
        ("<eval_with_key>.3", False, False),
        ("<string>", False, False),
        (f"{sys.prefix}/own.zip", True, False),
    ],
)
def test_what_is_the_users(file: str, given: bool, own: bool | None) -> None:
    assert is_user_file(file) == given
    if own is not None:
        assert is_project_file(file) == own


def test_the_innermost_line_is_the_users_even_where_torch_raises() -> None:
    try:
        torch.nn.Linear(2, 3)(torch.zeros(4, 5))
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].filename != __file__
    frame = innermost_user_frame(frames)
    assert frame is not None
    assert (frame.filename, frame.name) == (
        __file__,
        "test_the_innermost_line_is_the_users_even_where_torch_raises",
    )


def test_no_frame_of_the_user() -> None:
    assert innermost_user_frame([]) is None
