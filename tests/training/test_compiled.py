"""A compiled encoder trains as the one it was made of."""

import shutil

import numpy as np
import pytest
import torch

from tests.training.test_parts import assert_close, epochs, trainer_of
