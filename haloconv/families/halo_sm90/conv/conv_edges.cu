// halo_sm90 with other pixels of the image outside it (edges.cuh): the kernel of conv.cu, with two constants more.
//   EDGE_ROWS EDGE_COLS  what stands above and below an image, and at its left and right
//   HALO_ROWS            1, in place of EDGE_ROWS: above and below it are rows of the halo
#include "families/halo_sm90/conv/conv.cu"
