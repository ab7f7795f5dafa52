"""vLLM's connector.

Its settings are ``"kv_connector": "KvplanConnector", "kv_connector_module_path":
"kvplan_nixl.vllm"``.
"""

from kvplan_nixl.vllm.connector import KvplanConnector

__all__ = ["KvplanConnector"]
