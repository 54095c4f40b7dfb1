"""Retrieval: searching a gallery, answers with their guarantees, retrievers in folders."""
