"""Registers the presets of integrations.

`lineshaft.types` imports this module, so that every process which handles tasks knows them. A preset is data:
its module may import the model and nothing else.
"""

from lineshaft.integrations.loki.preset import LOKI
from lineshaft.integrations.officeplane.preset import OFFICEPLANE
from lineshaft.model.presets import register

for preset in (LOKI, OFFICEPLANE):
    register(preset)
