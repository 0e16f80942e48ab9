// Layers whose older blocks are coded into a smaller format: what a step's report says of it, and
// where such rows lie.
using System;
using System.Linq;
using System.Runtime.InteropServices;

namespace Kvrt.Tests
{
    internal static unsafe class DemotionTests
    {
        private const uint Text = 8;

        private static Engine Demoting(Action<Layer> change = null)
        {
            return new Engine(config => config.Options = PoolOptions.Debug, layer =>
            {
                layer.DemotedKeyFormat = StorageFormat.Int8Token;
                layer.DemoteAfter = 20;
                change?.Invoke(layer);
            }, layers: 1);
        }

        /// <summary>Of 70 tokens 50 are old, in 3 full blocks. A row of 32 channels of f16 is 64
        /// bytes, with codes of a byte and a scale 36.</summary>
        [Test]
        public static void BlocksOfOldTokensAreDemotedAtAStepsEnd()
        {
            using (Engine engine = Demoting())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                StepReport report = engine.Run(sequence, Text, 70);
                Check.Equal(3UL, report.DemotedBlocks, "blocks");
                Check.Equal(3UL * 16 * 2 * 2 * (64 - 36), report.DemotedBytes, "bytes");
                using (Step step = engine.Pool.BeginStep())
                {
                    double[] actual = engine.Forward(step, sequence, Text, 1)[0]
                        .Select(value => (double)value).ToArray();
                    Check.Close(engine.Expected(Text, 70, 0), actual, 0.02, "attention");
                    int[] sealedBlocks = { 9 }, indices = new int[5];
                    ExportedTables tables = step.Export(0, new TableBuffers
                    {
                        SealedBlocks = sealedBlocks, Indices = indices
                    });
                    Check.Equal(3, sealedBlocks[0], "sealed blocks");
                    CheckTables(tables);
                    // Token 21 is the sixth of the second block.
                    byte* block = (byte*)tables.Base + indices[1] * tables.BlockStride;
                    CheckRow(block + tables.SealedKeyOffset,
                             5 * tables.SealedKeyStrideSlot + tables.SealedKeyStrideHead,
                             tables.SealedKeyStrideDim, Engine.Row(0, Text, 21, 0));
                    CheckRow(block + tables.SealedValueOffset,
                             5 * tables.SealedValueStrideSlot + tables.SealedValueStrideHead,
                             tables.SealedValueStrideDim, Engine.Row(1, Text, 21, 0));
                    step.End();
                }
                engine.Pool.Check();
            }
        }

        private static void CheckTables(in ExportedTables tables)
        {
            Check.Equal(StorageFormat.Float16, tables.KeyFormat, "raw keys");
            Check.Equal(StorageFormat.Float16, tables.ValueFormat, "raw values");
            Check.Equal(StorageFormat.Int8Token, tables.SealedKeyFormat, "demoted keys");
            Check.Equal(StorageFormat.Int8Token, tables.SealedValueFormat, "demoted values");
            Check.Equal(16L * 2 * 2 * (64 - 36), tables.BlockBytes - tables.SealedBlockBytes,
                        "bytes of a block");
            Check.Equal(9u, tables.SealedKeyWords, "words of keys");
            Check.Equal(9u, tables.SealedValueWords, "words of values");
            Check.Equal(4u, tables.SealedKeyWordBytes, "bytes of a word of keys");
            Check.Equal(4u, tables.SealedValueWordBytes, "bytes of a word of values");
            Check.True(tables.SealedKeyStrideGroup > 0 && tables.SealedValueStrideGroup > 0,
                       "groups");
            Check.Equal(IntPtr.Zero, tables.SealedKeyScales, "scales of keys");
            Check.Equal(IntPtr.Zero, tables.SealedValueScales, "scales of values");
        }

        /// <summary>The second head's row: 32 codes, and their scale.</summary>
        private static void CheckRow(byte* operand, long first, long stride, float[] row)
        {
            var record = new byte[36];
            for (int word = 0; word < 9; ++word)
            {
                Marshal.Copy((IntPtr)(operand + 4 * (first + word * stride)), record, 4 * word, 4);
            }
            float scale = BitConverter.ToSingle(record, 32);
            for (int i = 0; i < Engine.Dim; ++i)
            {
                float exact = row[Engine.Dim + i], found = (sbyte)record[i] * scale;
                Check.True(Math.Abs(found - exact) <= 0.51 * scale + 1e-3,
                           $"channel {i} is {found}, was {exact}");
            }
        }

        [Test]
        public static void DemotedFormatsHaveStoragesOfTheirOwn()
        {
            using (Engine engine = Demoting(layer =>
            {
                layer.DemotedKeyFormat = StorageFormat.Float8E4M3;
                layer.DemotedValueFormat = StorageFormat.Int4Token;
                layer.DemotedKeyStorage = new Storage { Scales = new[] { 0.5f, 0.25f } };
                layer.DemotedValueStorage = new Storage { Options = StorageOptions.Rotate };
                layer.DemoteAfter = 1000; // more than there will be
            }))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                Check.Equal(0UL, engine.Run(sequence, Text, 70).DemotedBlocks, "blocks");
                using (Step step = engine.Pool.BeginStep())
                {
                    step.Append(sequence, 1);
                    step.Reserve();
                    ExportedTables tables = step.Export(0, default);
                    Check.Equal(StorageFormat.Float8E4M3, tables.SealedKeyFormat, "keys");
                    Check.Equal(StorageFormat.Int4Token, tables.SealedValueFormat, "values");
                    Check.Equal(8u, tables.SealedKeyWords, "words of keys");
                    Check.Equal(5u, tables.SealedValueWords, "words of values");
                    Check.Equal(IntPtr.Zero, tables.KeyScales, "scales of raw keys");
                    Check.Equal(IntPtr.Zero, tables.SealedValueScales, "scales of values");
                    var scales = new float[2];
                    Marshal.Copy(tables.SealedKeyScales, scales, 0, 2);
                    Check.SameElements(new[] { 0.5f, 0.25f }, scales, "scales of keys");
                }
            }
        }

        [Test]
        public static void WhatCannotBeDemotedIsRefused()
        {
            Refuses(Status.Invalid, "demote_after without demoted_key_format",
                    layer => layer.DemotedKeyFormat = StorageFormat.Default);
            Refuses(Status.Invalid, "demote_after is 1073741825",
                    layer => layer.DemoteAfter = (1u << 30) + 1);
            Refuses(Status.Unsupported, "key_format q8_0",
                    layer => layer.KeyFormat = StorageFormat.Q8_0);
            Refuses(Status.Unsupported, "demoted_value_format is kvarn4",
                    layer => layer.DemotedValueFormat = StorageFormat.Kvarn4);
            Refuses(Status.Invalid, "save nothing",
                    layer => layer.DemotedKeyFormat = StorageFormat.Float16);
            Refuses(Status.Invalid, "demoted_key_storage: fp8_e5m2 needs static scales",
                    layer => layer.DemotedKeyFormat = StorageFormat.Float8E5M2);
            Refuses(Status.Unsupported, "demoted_value_storage: f16 is not stored rotated", layer =>
            {
                layer.DemotedValueFormat = StorageFormat.Float16;
                layer.DemotedValueStorage = new Storage { Options = StorageOptions.Rotate };
            });
        }

        private static void Refuses(Status status, string words, Action<Layer> change)
        {
            Check.Fails(status, words, () => Demoting(change).Dispose());
        }
    }
}
