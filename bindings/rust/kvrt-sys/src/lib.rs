//! The C interface of libkvrt, declared one to one and without logic.
//!
//! `kvrt.h`, and `kv_cuda.h` for pools on CUDA devices, are the reference: they say what every call
//! does, which errors it has, and from which threads it may be made. The `kvrt` crate is the safe
//! layer.
#![no_std]
#![allow(non_camel_case_types)]

mod constants;
mod cuda;
mod functions;
mod policies;
mod structs;

pub use constants::*;
pub use cuda::*;
pub use functions::*;
pub use policies::*;
pub use structs::*;
