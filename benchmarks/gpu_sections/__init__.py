"""The sections of gpu_check.py in running order: cheap and telling ones first."""

from gpu_sections.cost import GENERATION, GUARDS, MEMORY, SPEED
from gpu_sections.files import FILES
from gpu_sections.fp16 import FP16
from gpu_sections.layer import LAYER
from gpu_sections.numbers import ATTENTION, GRADIENTS, MACHINE, PRODUCTS
from gpu_sections.runner import Section
from gpu_sections.steps import BITS
from gpu_sections.tests import TESTS

SECTIONS: tuple[Section, ...] = (MACHINE, GRADIENTS, BITS, FP16, LAYER, PRODUCTS, ATTENTION)
SECTIONS += (MEMORY, GUARDS, SPEED, GENERATION, FILES, TESTS)
