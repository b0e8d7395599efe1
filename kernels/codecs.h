// Every codec in per-bucket form (see bucket.h). A new one is its header and its name here.
#pragma once

#include "onebit.h"
#include "trellis.h"

#define QCCL_BUCKET_CODECS(each) each(OneBit) each(Trellis)
