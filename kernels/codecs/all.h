// The registry of codecs. Each codec has a folder, an include of its codec.h, and a name in QCCL_CODECS. A codec may also
// have host loops (host.h) or device code (device.h) of its own.
#pragma once

#include "blocks/codec.h"
#include "cast/codec.h"
#include "dithering/codec.h"
#include "minmax/codec.h"
#include "none/codec.h"
#include "onebit/codec.h"
#include "randomk/codec.h"
#include "topk/codec.h"
#include "trellis/codec.h"

#if defined(QCCL_HOST_LOOPS)
#include "blocks/host.h"
#include "minmax/host.h"
#include "none/host.h"
#include "onebit/host.h"
#include "randomk/host.h"
#include "trellis/host.h"
#else
#include "blocks/device.h"
#include "cast/device.h"
#include "minmax/device.h"
#include "none/device.h"
#include "onebit/device.h"
#include "trellis/device.h"
#endif

#define QCCL_CODECS(each) \
  each(Blocks) each(Cast) each(Dithering) each(MinMax) each(NoCodec) each(OneBit) each(RandomK) each(TopK) each(Trellis)
