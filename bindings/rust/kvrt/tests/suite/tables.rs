//! Exported tables: against what the text put where, with an own kernel, and with fences.

use kvrt::{Format, Layout, Pool, Status, TableBuffers, Tables, TileStrides};

use crate::common::*;

/// The f32 of a block, by the exported constants.
fn element(tables: &Tables<'_>, block: &[u8], values: bool, at: [usize; 3]) -> f32 {
    let (offset, strides) = if values {
        (tables.value_offset(), tables.value_strides())
    } else {
        (tables.key_offset(), tables.key_strides())
    };
    let start = byte_offset(tables.slot_group(), offset, strides, at);
    f32::from_le_bytes(block[start..start + 4].try_into().unwrap())
}

fn byte_offset(group: u32, offset: i64, strides: TileStrides, at: [usize; 3]) -> usize {
    let [slot, head, dim] = at.map(|index| index as i64);
    let group = i64::from(group);
    let index = slot / group * strides.group
        + slot % group * strides.slot
        + head * strides.head
        + dim * strides.dim;
    (offset + 4 * index) as usize
}

fn step_with<'p>(pool: &'p Pool, items: &[(kvrt::Sequence, u32)]) -> kvrt::Step<'p> {
    let step = pool.begin_step().unwrap();
    for &(sequence, count) in items {
        step.append(sequence, count, None).unwrap();
    }
    step.reserve().unwrap();
    step
}

#[test]
fn tables_say_where_every_token_lies() {
    let _session = Session::new();
    for layout in [Layout::Native, Layout::Hnd, Layout::Nhd] {
        let pool: Pool = create(&config().layout(layout), 2);
        let (a, b) = (sequence(&pool), sequence(&pool));
        let (text_a, text_b) = (Text::new(SHAPE, 2, 40, 71), Text::new(SHAPE, 2, 20, 72));
        text_a.run(&pool, a, 0..35);
        text_b.run(&pool, b, 0..16);
        let mut step = step_with(&pool, &[(a, 3), (b, 1)]);

        let (mut block_table, mut indptr, mut indices) = (vec![9; 12], vec![9; 3], vec![9; 5]);
        let (mut last_page_len, mut kv_len) = (vec![9; 2], vec![9; 4]);
        let (mut slot_mapping, mut positions) = (vec![9; 4], vec![9; 4]);
        let (mut query_start, mut slot_indptr) = (vec![9; 3], vec![9; 3]);
        let mut slot_positions = vec![9; 110];
        let mut buffers = TableBuffers {
            block_table: Some(&mut block_table),
            block_table_stride: 4,
            indptr: Some(&mut indptr),
            indices: Some(&mut indices),
            last_page_len: Some(&mut last_page_len),
            slot_mapping: Some(&mut slot_mapping),
            query_start: Some(&mut query_start),
            kv_len: Some(&mut kv_len),
            positions: Some(&mut positions),
            slot_positions: Some(&mut slot_positions),
            slot_indptr: Some(&mut slot_indptr),
            ..Default::default()
        };
        let tables = step.export(1, &mut buffers).unwrap();
        assert_eq!((tables.layout(), tables.key_format()), (layout, Format::F32));
        assert_eq!((tables.value_format(), tables.block_tokens()), (Format::F32, 16));
        assert_eq!(tables.block_bytes(), 16 * 2 * 2 * 32 * 4);
        assert!(tables.key_scales().is_null() && tables.value_scales().is_null());
        let sizes = tables.sizes();
        assert_eq!((sizes.items, sizes.tokens, sizes.max_blocks), (2, 4, 3));
        assert_eq!((sizes.indices, sizes.slot_positions), (5, 2 * (38 + 17)));
        // What was accepted before lies in the blocks that the tables name.
        for (item, text, tokens) in [(0, &text_a, 35), (1, &text_b, 16)] {
            for token in 0..tokens {
                let block = tables.block(item, token / 16).unwrap();
                for head in 0..2 {
                    for dim in 0..32 {
                        let at = [token % 16, head, dim];
                        let index = (token * 2 + head) * 32 + dim;
                        assert_eq!(element(&tables, block, false, at), text.keys[1][index]);
                        assert_eq!(element(&tables, block, true, at), text.values[1][index]);
                    }
                }
            }
        }
        assert_error(tables.block(0, 3), Status::INVALID, "no block 3 of item 0");
        assert_error(tables.block(1, 2), Status::INVALID, "no block 2 of item 1");
        assert_error(tables.block(2, 0), Status::INVALID, "item 2");
        assert_error(tables.block(usize::MAX, usize::MAX), Status::INVALID, "");

        assert_eq!(indptr, [0, 3, 5]);
        assert_eq!(block_table[..3], indices[..3]);
        // The row behind the last item keeps what it held, and names no block.
        assert_eq!(block_table[3..], [-1, indices[3], indices[4], -1, -1, 9, 9, 9, 9]);
        assert_eq!(last_page_len, [6, 1]);
        assert_eq!(kv_len[..2], [38, 17]);
        assert_eq!(query_start, [0, 3, 4]);
        assert_eq!(positions, [35, 36, 37, 16]);
        let slot = |block: i32, slot: i64| i64::from(block) * 16 + slot;
        let expected =
            [slot(indices[2], 3), slot(indices[2], 4), slot(indices[2], 5), slot(indices[4], 0)];
        assert_eq!(slot_mapping, expected);
        assert_eq!(slot_indptr, [0, 38, 55]);
        let one_head: Vec<i32> = (0..38).chain(0..17).collect();
        assert_eq!(slot_positions, [one_head.clone(), one_head].concat());
    }
}

#[test]
fn groups_of_slots_are_stepped_over() {
    let _session = Session::new();
    let pool: Pool = create(&config().block_tokens(64), 1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 65, 75);
    text.run(&pool, sequence, 0..64);
    let mut step = step_with(&pool, &[(sequence, 1)]);
    let (mut indptr, mut indices) = (vec![7; 2], vec![7; 2]);
    let mut buffers = TableBuffers {
        indptr: Some(&mut indptr),
        indices: Some(&mut indices),
        ..Default::default()
    };
    let tables = step.export(0, &mut buffers).unwrap();
    assert_eq!((tables.slot_group(), tables.block_tokens()), (16, 64));
    let block = tables.block(0, 0).unwrap();
    for slot in 0..64 {
        for (head, dim) in [(0, 0), (0, 31), (1, 7)] {
            let index = (slot * 2 + head) * 32 + dim;
            assert_eq!(element(&tables, block, false, [slot, head, dim]), text.keys[0][index]);
            assert_eq!(element(&tables, block, true, [slot, head, dim]), text.values[0][index]);
        }
    }
}

#[test]
fn keys_and_values_have_formats_of_their_own() {
    let _session = Session::new();
    let layer = SHAPE.layer().key_format(Format::F32).value_format(Format::Bf16);
    let pool = Pool::create(&config(), &kvrt::Model::new([layer])).unwrap();
    let sequence = sequence(&pool);
    let mut step = step_with(&pool, &[(sequence, 1)]);
    let mut buffers = TableBuffers::default();
    let tables = step.export(0, &mut buffers).unwrap();
    assert_eq!((tables.key_format(), tables.value_format()), (Format::F32, Format::Bf16));
    assert_eq!(tables.block_bytes(), 16 * 2 * 32 * (4 + 2));
}

#[test]
fn an_own_kernel_writes_and_the_library_attends() {
    let _session = Session::new();
    let pool: Pool = create(&config().layout(Layout::Nhd), 1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 40, 73);
    let mut step = step_with(&pool, &[(sequence, 40)]);
    let mut slots = vec![0; 40];
    let mut buffers = TableBuffers { slot_mapping: Some(&mut slots), ..Default::default() };
    let tables = step.export(0, &mut buffers).unwrap();
    for token in 0..40 {
        let slot = tables.buffers().slot_mapping.as_ref().unwrap()[token];
        let block = slot / 16 * tables.block_stride();
        for (values, source, offset, strides) in [
            (false, &text.keys[0], tables.key_offset(), tables.key_strides()),
            (true, &text.values[0], tables.value_offset(), tables.value_strides()),
        ] {
            for head in 0..2 {
                for dim in 0..32 {
                    let at = [(slot % 16) as usize, head, dim];
                    let inside = byte_offset(tables.slot_group(), offset, strides, at);
                    assert!(inside + 4 <= tables.block_bytes(), "values: {values}");
                    // SAFETY: the slot is one of this step's new tokens, and the place lies within
                    // its block.
                    unsafe {
                        let place = tables.base().offset(block as isize).add(inside);
                        place.cast::<f32>().write(source[(token * 2 + head) * 32 + dim]);
                    }
                }
            }
        }
    }
    let mut out = vec![0.0; 40 * SHAPE.out_row()];
    step.attend(0, &dense(&text.queries[0], 40, 4), &mut dense_mut(&mut out, 40, 4)).unwrap();
    step.end().unwrap();
    text.assert_outputs(0, 0..40, &out, 2e-6, &Rule::default(), causal);
    pool.check().unwrap();
}

#[test]
fn a_small_buffer_is_a_limit_with_the_needed_sizes() {
    let _session = Session::new();
    let pool = pool(1);
    let (a, b) = (sequence(&pool), sequence(&pool));
    let step_items = [(a, 40), (b, 1)];
    let mut step = step_with(&pool, &step_items);
    let mut none: [i32; 0] = [];
    let mut small = TableBuffers { indices: Some(&mut none), ..Default::default() };
    assert_error(step.export(0, &mut small), Status::LIMIT, "4 are needed");
    let needed = small.needed;
    assert_eq!((needed.items, needed.tokens, needed.max_blocks), (2, 41, 3));
    assert_eq!((needed.indices, needed.slot_positions), (4, 82));

    type Give = for<'b> fn(&mut TableBuffers<'b>, &'b mut [i32]);
    let too_small: [(Give, usize, &str); 8] = [
        (|b, m| b.last_page_len = Some(m), 1, "item_capacity"),
        (|b, m| b.kv_len = Some(m), 0, "item_capacity"),
        (|b, m| b.indptr = Some(m), 2, "item_capacity"),
        (|b, m| b.query_start = Some(m), 2, "item_capacity"),
        (|b, m| b.slot_indptr = Some(m), 1, "item_capacity"),
        (|b, m| b.positions = Some(m), 40, "token_capacity"),
        (|b, m| b.slot_positions = Some(m), 81, "slot_positions_capacity"),
        (|b, m| (b.block_table, b.block_table_stride) = (Some(m), 3), 5, "block_table_capacity"),
    ];
    for (give, length, words) in too_small {
        let mut memory = vec![77; 100];
        let mut buffers = TableBuffers::default();
        give(&mut buffers, &mut memory[..length]);
        assert_error(step.export(0, &mut buffers), Status::LIMIT, words);
        assert_eq!(buffers.needed, needed);
        assert!(memory.iter().all(|&x| x == 77), "{words}: something was written");
    }
    // The smallest of the buffers that one capacity speaks for counts.
    let (mut many, mut few) = (vec![77; 50], vec![77; 1]);
    let mut buffers = TableBuffers {
        kv_len: Some(&mut many),
        last_page_len: Some(&mut few),
        ..Default::default()
    };
    assert_error(step.export(0, &mut buffers), Status::LIMIT, "item_capacity holds 1");
    let mut none: [i64; 0] = [];
    let mut buffers = TableBuffers { slot_mapping: Some(&mut none), ..Default::default() };
    assert_error(step.export(0, &mut buffers), Status::LIMIT, "token_capacity holds 0");
    let mut wide = vec![0; 4];
    let mut buffers = TableBuffers {
        block_table: Some(&mut wide),
        block_table_stride: usize::MAX,
        ..Default::default()
    };
    assert_error(step.export(0, &mut buffers), Status::LIMIT, "");
    let mut empty: [i32; 0] = [];
    let mut buffers = TableBuffers { indptr: Some(&mut empty), ..Default::default() };
    assert_error(step.export(0, &mut buffers), Status::INVALID, "indptr: no elements");

    let mut buffers = TableBuffers::default();
    let tables = step.export(0, &mut buffers).unwrap();
    assert_error(tables.block(0, 0), Status::INVALID, "in the buffers");
    assert_error(step.export(1, &mut buffers), Status::INVALID, "layer 1");
    drop(step);
    let mut step = pool.begin_step().unwrap();
    assert_error(step.export(0, &mut TableBuffers::default()), Status::INVALID, "reserve first");
}

#[test]
fn blocks_are_found_through_csr_tables_too() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 40, 74);
    text.run(&pool, sequence, 0..39);
    let mut step = step_with(&pool, &[(sequence, 1)]);
    let (mut indptr, mut indices) = (vec![7; 10], vec![7; 10]);
    let mut buffers = TableBuffers {
        indptr: Some(&mut indptr),
        indices: Some(&mut indices),
        ..Default::default()
    };
    let tables = step.export(0, &mut buffers).unwrap();
    let block = tables.block(0, 2).unwrap();
    assert_eq!(element(&tables, block, false, [6, 1, 31]), text.keys[0][38 * 64 + 63]);
    assert_error(tables.block(0, 3), Status::INVALID, "no block 3");
    assert_error(tables.block(1, 0), Status::INVALID, "item 1");
    assert_error(tables.block(usize::MAX, 0), Status::INVALID, "");
}

#[test]
fn blocks_wait_for_the_fence_of_the_host() {
    let _session = Session::new();
    let pool: Pool = create(&config().host_fences(true), 1);
    let sequence = sequence(&pool);
    let mut step = step_with(&pool, &[(sequence, 40)]);
    let fence = step.export(0, &mut TableBuffers::default()).unwrap().fence();
    assert_error(pool.pass_fence(fence), Status::INVALID, "still open");
    assert_eq!(step.end().unwrap().fence, fence);
    pool.release_sequence(sequence).unwrap();
    assert_eq!(pool.counters().pool().unwrap().parked, 3);
    pool.pass_fence(fence).unwrap();
    assert_eq!(pool.counters().pool().unwrap().parked, 0);
    assert_error(pool.pass_fence(fence + 1), Status::INVALID, "the last step begun");
    assert_error(crate::common::pool(1).pass_fence(1), Status::INVALID, "HOST_FENCES");
}
