"""The sections of gpu_check.py, in the order in which they run: cheap ones that say much come
first.
"""

from gpu_sections.cost import CALIBRATION, GENERATION, GUARDS, MEMORY, SPEED
from gpu_sections.numbers import ATTENTION, GRADIENTS, LOADING, MACHINE, PRODUCTS
from gpu_sections.runner import Section
from gpu_sections.steps import BITS, WAITS
from gpu_sections.whole import CAMPAIGN, TWO_GPUS

SECTIONS: tuple[Section, ...] = (
    MACHINE,
    LOADING,
    WAITS,
    GRADIENTS,
    BITS,
    PRODUCTS,
    ATTENTION,
    MEMORY,
    GUARDS,
    SPEED,
    GENERATION,
    CALIBRATION,
    TWO_GPUS,
    CAMPAIGN,
)
