"""The settings of SGLang's plugin: variables of the environment that begin with ``KVPLAN_``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from kvplan_nixl.settings import Settings

PREFIX: Final = "KVPLAN_"

OF_KUBERNETES: Final = re.compile(
    r"KVPLAN_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)\w*)=.*|KVPLAN_PORT=(tcp|udp)://.*"
)
"""The variables of a service of the name *kvplan*, which Kubernetes sets in each container."""


def settings_of(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings in an environment. Raises ``SETTING``, ``TYPE`` and ``RANGE``.

    >>> settings_of({"KVPLAN_LEASE_S": "10", "HOME": "/root"}).lease_s
    10.0
    """
    texts = {}
    for variable, text in environment.items():
        is_foreign = OF_KUBERNETES.fullmatch(f"{variable}={text}")
        if variable.startswith(PREFIX) and not is_foreign:
            texts[variable.removeprefix(PREFIX).lower()] = text
    return Settings.read_texts(texts, f"the environment's {PREFIX}*")
