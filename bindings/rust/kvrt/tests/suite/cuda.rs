//! Pools on a CUDA device, chosen by configuration: what is told where there is none, that host
//! memory and device memory are not taken for each other, and a step where there is one.

use std::ffi::c_void;
use std::io::Write;
use std::ptr::{null, null_mut};

use kvrt::{
    capabilities, cuda_device, CudaAllocator, CudaScoreMethod, CudaScoring, Device, DeviceElement,
    DeviceTensor, Elements, Layer, Model, Pool, PoolConfig, SequenceConfig, Status, Tensor,
};

use crate::common::Session;

fn model() -> Model {
    Model::new([Layer::new(4, 2, 64)])
}

fn config() -> PoolConfig {
    PoolConfig::new(4 << 20).max_sequences(4).max_tokens_per_sequence(64).threads(1)
}

#[test]
fn the_device_is_there_or_the_reason_is() {
    let _session = Session::new();
    assert!(capabilities().unwrap().has_device(Device::Cpu));
    match cuda_device() {
        Ok(device) => {
            assert!(!device.name.is_empty() && device.memory_bytes > 0 && device.compute.0 > 0);
        }
        Err(error) => {
            assert_eq!(error.status(), Status::UNSUPPORTED, "{error}");
            let text = error.to_string();
            assert!(text.contains("CUDA"), "{text}");
            // A pool is refused for the same reason.
            let refused = Pool::create(&config().device(Device::Cuda), &model()).unwrap_err();
            assert_eq!(refused.status(), Status::UNSUPPORTED);
            assert_eq!(refused.to_string(), text);
        }
    }
}

#[test]
fn device_memory_is_for_pools_that_can_be_in_it() {
    unsafe extern "C" fn allocate(_: *mut c_void, _: usize, _: usize) -> *mut c_void {
        panic!("it is refused before")
    }
    unsafe extern "C" fn release(_: *mut c_void, _: *mut c_void, _: usize, _: usize) {}
    let _session = Session::new();
    let allocator = CudaAllocator { user: std::ptr::null_mut(), allocate, release };
    for (config, status, words) in [
        (config(), Status::INVALID, "KV_DEVICE_CUDA"),
        (config().device(Device::Cuda).elastic(true), Status::UNSUPPORTED, "KV_POOL_ELASTIC"),
    ] {
        // SAFETY: neither function is called.
        let refused = unsafe { Pool::create_in_device_memory(&config, &model(), allocator) };
        let refused = refused.unwrap_err();
        assert_eq!(refused.status(), status);
        assert!(refused.to_string().contains(words), "{refused}");
    }
}

#[test]
fn a_pool_on_the_cpu_takes_nothing_of_a_device() {
    let _session = Session::new();
    let pool = Pool::create(&config().device(Device::Cpu), &model()).unwrap();
    assert_eq!(pool.cuda_memory_bytes().unwrap_err().status(), Status::INVALID);
    assert_eq!(pool.cuda_scoring().unwrap_err().status(), Status::INVALID);
    for (method, words) in [(CudaScoreMethod::Products, "CPU"), (CudaScoreMethod::Other(9), "9")] {
        let scoring = CudaScoring { method, workspace_bytes: 0, tf32: true };
        let refused = pool.set_cuda_scoring(&scoring).unwrap_err();
        assert_eq!(refused.status(), Status::INVALID);
        assert!(refused.to_string().contains(words), "{refused}");
    }
    let sequence = pool.create_sequence(&SequenceConfig::new()).unwrap();
    // SAFETY: it is refused before anybody follows them.
    let refused = unsafe { pool.set_cuda_scores(sequence, 0, 0..1, null(), null_mut()) };
    assert_eq!(refused.unwrap_err().status(), Status::INVALID);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 1, None).unwrap();
    // SAFETY: it is refused before anybody follows it.
    let refused = unsafe { step.use_cuda_stream(8 as *mut _) }.unwrap_err();
    assert_eq!(refused.status(), Status::INVALID);
    assert!(refused.to_string().contains("CPU"), "{refused}");
    step.reserve().unwrap();
    assert_eq!(step.cuda_tables(0, 0).unwrap_err().status(), Status::INVALID);
    assert_eq!(step.cuda_tables_attended(0, 0).unwrap_err().status(), Status::INVALID);
    let nowhere = DeviceTensor::dense(4096, DeviceElement::F16, [1, 2, 64]);
    // SAFETY: as above.
    let refused = unsafe { step.write_on_device(0, &nowhere, &nowhere) }.unwrap_err();
    assert!(refused.to_string().contains("on the CPU"), "{refused}");
    // SAFETY: as above.
    let refused = unsafe { step.attend_on_device(0, &nowhere, &nowhere, 0) }.unwrap_err();
    assert!(refused.to_string().contains("on the CPU"), "{refused}");
    step.cancel().unwrap();
}

#[test]
fn a_pool_on_the_device_takes_nothing_of_the_host() {
    let _session = Session::new();
    let pool = match Pool::create(&config().device(Device::Cuda), &model()) {
        Ok(pool) => pool,
        Err(error) => {
            // Not by print!, which is not shown of a test that passes.
            writeln!(std::io::stderr(), "\na pool on CUDA: skipped: {error}").unwrap();
            assert_eq!(error.status(), Status::UNSUPPORTED);
            return;
        }
    };
    assert!(pool.cuda_memory_bytes().unwrap() >= 4 << 20);
    assert_eq!(pool.cuda_scoring().unwrap().method, CudaScoreMethod::Kernel);
    let sequence = pool.create_sequence(&SequenceConfig::new()).unwrap();
    let step = pool.begin_step().unwrap();
    step.append(sequence, 1, None).unwrap();
    let numbers = vec![0.0f32; 128];
    let tensor = Tensor::dense(Elements::F32(&numbers), [1, 2, 64]);
    let refused = step.write(0, &tensor, &tensor).unwrap_err();
    assert!(refused.to_string().contains("write_on_device"), "{refused}");
    step.cancel().unwrap();
}
