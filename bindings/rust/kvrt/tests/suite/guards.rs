//! The library touches nothing before or behind the slices that it is lent: they lie between pages
//! that no one may touch.

use std::ffi::{c_int, c_long, c_void};

use kvrt::{
    AttendOptions, Elements, ElementsMut, Format, Model, Pool, Rope, RopeStyle, SequenceConfig,
    Tensor, TensorMut,
};

use crate::common::*;

extern "C" {
    fn mmap(
        address: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: c_long,
    ) -> *mut c_void;
    fn munmap(address: *mut c_void, length: usize) -> c_int;
    fn mprotect(address: *mut c_void, length: usize, protection: c_int) -> c_int;
}

const NO_ACCESS: c_int = 0;
const READ_AND_WRITE: c_int = 1 | 2;
const PRIVATE_AND_ANONYMOUS: c_int = 0x22;
/// Of guards and of memory: a multiple of every page size.
const AREA: usize = 1 << 16;

/// Memory between two guards.
struct Guarded(*mut u8);

impl Guarded {
    fn new() -> Guarded {
        // SAFETY: fresh memory of three areas; the outer ones are closed.
        unsafe {
            let flags = PRIVATE_AND_ANONYMOUS;
            let start = mmap(std::ptr::null_mut(), 3 * AREA, READ_AND_WRITE, flags, -1, 0);
            assert_ne!(start as isize, -1, "no memory");
            let start = start.cast::<u8>();
            assert_eq!(mprotect(start.cast(), AREA, NO_ACCESS), 0);
            assert_eq!(mprotect(start.add(2 * AREA).cast(), AREA, NO_ACCESS), 0);
            Guarded(start)
        }
    }

    /// A copy that begins, or ends, right at a guard.
    fn place<T: Copy>(&mut self, values: &[T], at_end: bool) -> &mut [T] {
        let bytes = std::mem::size_of_val(values);
        assert!(bytes <= AREA);
        // SAFETY: both places lie within the open area and are aligned: sizes are multiples of T's.
        unsafe {
            let start = self.0.add(if at_end { 2 * AREA - bytes } else { AREA }).cast::<T>();
            start.copy_from_nonoverlapping(values.as_ptr(), values.len());
            std::slice::from_raw_parts_mut(start, values.len())
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the three areas of `new`.
        unsafe { munmap(self.0.cast(), 3 * AREA) };
    }
}

/// Dimensions that fill no vector register, and one row more or less than a group.
const ODD: Shape = Shape { query_heads: 6, kv_heads: 3, key_dim: 40, value_dim: 56 };

fn odd_pool(format: Format) -> Pool {
    let rope = Rope::new(RopeStyle::Interleaved).dimensions(24);
    Pool::create(&config(), &Model::new([ODD.layer().key_format(format).rope(rope)])).unwrap()
}

#[test]
fn slices_of_f32_are_kept_to() {
    let _session = Session::new();
    for (format, rows, at_end) in [
        (Format::F32, 1, true),
        (Format::F32, 17, false),
        (Format::F16, 17, true),
        (Format::Bf16, 15, true),
        (Format::F16, 1, false),
    ] {
        let pool = odd_pool(format);
        let gathering = SequenceConfig::new().gather_statistics(true);
        let sequence = pool.create_sequence(&gathering).unwrap();
        let text = Text::new(ODD, 1, rows, 141);
        let step = pool.begin_step().unwrap();
        step.append(sequence, rows as u32, None).unwrap();
        step.reserve().unwrap();
        let mut areas = [(); 5].map(|()| Guarded::new());
        let [keys, values, queries, out, lse] = &mut areas;
        let keys = dense(keys.place(&text.keys[0], at_end), rows, 3);
        let values = dense(values.place(&text.values[0], at_end), rows, 3);
        let queries = dense(queries.place(&text.queries[0], at_end), rows, 6);
        let out = out.place(&vec![0.0; rows * ODD.out_row()], at_end);
        let log_sum_exp = Some(lse.place(&vec![0.0; rows * 6], at_end));
        step.write(0, &keys, &values).unwrap();
        let options = AttendOptions { log_sum_exp, ..Default::default() };
        step.attend_with(0, &queries, &mut dense_mut(out, rows, 6), options).unwrap();
        step.end().unwrap();
        text.assert_outputs(0, 0..rows, out, 2e-6, &Rule::default(), causal);
    }
}

#[test]
fn slices_of_half_bits_are_kept_to() {
    let _session = Session::new();
    for (rows, at_end) in [(1, true), (17, true), (15, false)] {
        let pool = odd_pool(Format::F16);
        let gathering = SequenceConfig::new().gather_statistics(true);
        let sequence = pool.create_sequence(&gathering).unwrap();
        let text = Text::new(ODD, 1, rows, 142);
        let bits = |values: &[f32]| values.iter().map(|&x| f16_bits(x)).collect::<Vec<u16>>();
        let step = pool.begin_step().unwrap();
        step.append(sequence, rows as u32, None).unwrap();
        step.reserve().unwrap();
        let mut areas = [(); 4].map(|()| Guarded::new());
        let [keys, values, queries, out] = &mut areas;
        let lend = |area: &mut Guarded, values: &[f32]| {
            let placed: *const [u16] = area.place(&bits(values), at_end);
            // SAFETY: the area lives until the end of this round.
            unsafe { &*placed }
        };
        let keys = lend(keys, &text.keys[0]);
        let values = lend(values, &text.values[0]);
        let queries = lend(queries, &text.queries[0]);
        let out = out.place(&vec![0u16; rows * ODD.out_row()], at_end);
        let keys = Tensor::dense(Elements::F16(keys), [rows, 3, 40]);
        let values = Tensor::dense(Elements::F16(values), [rows, 3, 56]);
        let queries = Tensor::dense(Elements::F16(queries), [rows, 6, 40]);
        step.write(0, &keys, &values).unwrap();
        let lent = ElementsMut::F16(out);
        step.attend(0, &queries, &mut TensorMut::dense(lent, [rows, 6, 56])).unwrap();
        step.end().unwrap();
        let found: Vec<f32> = out.iter().map(|&bits| f16_value(bits)).collect();
        text.assert_outputs(0, 0..rows, &found, 1.0 / 2048.0, &Rule::default(), causal);
    }
}

#[test]
fn a_guard_is_a_guard() {
    let mut area = Guarded::new();
    let end = area.place(&[1u8], true).as_mut_ptr() as usize + 1;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let closed = |line: &&str| line.starts_with(&format!("{end:x}-")) && line.contains(" ---p ");
    assert_eq!(maps.lines().filter(closed).count(), 1, "{end:x}: {maps}");
}
