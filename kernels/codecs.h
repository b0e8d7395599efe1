// Every codec in per-bucket form (see bucket.h). A new one is its header and its name here.
#pragma once

#include "cast.h"
#include "dithering.h"
#include "onebit.h"
#include "randomk.h"
#include "topk.h"
#include "trellis.h"

#define QCCL_BUCKET_CODECS(each) each(Cast) each(Dithering) each(OneBit) each(RandomK) each(TopK) each(Trellis)
