// halo_sm90_wgrad with other pixels of the image outside it (edges.cuh): the kernel of wgrad.cu, with two constants
// more.
//   EDGE_ROWS EDGE_COLS  what stands above and below an image, and at its left and right
#include "families/halo_sm90/wgrad/wgrad.cu"
