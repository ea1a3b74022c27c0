"""Text to micro-batches: sources, tokenizers, the `.bin`/`.idx` format, packing and sampling."""

from isp.data.batch import BatchSampler, MicroBatch, held_out_micro_batches
from isp.data.config import DataConfig
from isp.data.dataset import IGNORE_INDEX, PackedDataset, Sample
from isp.data.documents import iterate_documents
from isp.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype
from isp.data.load import Datasets, open_datasets, open_store
from isp.data.prefetch import Prefetcher
from isp.data.prepare import PrepareSummary, prepare
from isp.data.stores import ConcatStore, MemoryStore, SubsetStore, TokenStore, held_out
from isp.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "BatchSampler",
    "ByteTokenizer",
    "ConcatStore",
    "DataConfig",
    "Datasets",
    "HFTokenizer",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MemoryStore",
    "MicroBatch",
    "PackedDataset",
    "Prefetcher",
    "PrepareSummary",
    "Sample",
    "SubsetStore",
    "TokenStore",
    "Tokenizer",
    "held_out",
    "held_out_micro_batches",
    "iterate_documents",
    "load_tokenizer",
    "open_datasets",
    "open_store",
    "prepare",
    "token_dtype",
]
