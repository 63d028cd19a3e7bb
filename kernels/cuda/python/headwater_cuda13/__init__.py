"""Holds libheadwater_cuda.so, which headwaterd of the package headwater-server loads. There is nothing to import."""
