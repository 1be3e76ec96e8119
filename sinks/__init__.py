"""Where events go: files and webhooks. Each sink satisfies `eventbus.Sink`; attach it to a bus."""

from sinks.csv import CSVSink
from sinks.errors import WebhookError
from sinks.jsonl import JSONLEvents, JSONLSink, read_jsonl
from sinks.retry import Retry
from sinks.webhook import DeadLetter, WebhookSink

__all__ = [
    "CSVSink",
    "DeadLetter",
    "JSONLEvents",
    "JSONLSink",
    "Retry",
    "WebhookError",
    "WebhookSink",
    "read_jsonl",
]
