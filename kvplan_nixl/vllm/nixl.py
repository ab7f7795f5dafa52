"""vLLM's connector under the name of vLLM's own, for routers that know connectors by their names.

Its settings are ``"kv_connector": "NixlConnector", "kv_connector_module_path":
"kvplan_nixl.vllm.nixl"``.
"""

from kvplan_nixl.vllm.connector import KvplanConnector as NixlConnector

__all__ = ["NixlConnector"]
