// Formats that store less than they are given: what attention loses by them, static scales, and
// elements that saturate.
using System;
using System.Linq;
using System.Runtime.InteropServices;

namespace Kvrt.Tests
{
    internal static class StorageTests
    {
        private const uint Text = 5;

        /// <summary>64 tokens of a text, and the error of the next one: the root of the mean square
        /// over the elements. Inputs are in [-1, 1), results of plain attention about 0.1.
        /// </summary>
        private static double Error(StorageFormat format, Storage storage = null)
        {
            using (var engine = new Engine(shape: layer =>
            {
                layer.KeyFormat = format;
                layer.KeyStorage = layer.ValueStorage = storage;
            }, layers: 1))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, Text, 64);
                using (Step step = engine.Pool.BeginStep())
                {
                    float[] actual = engine.Forward(step, sequence, Text, 1)[0];
                    double[] expected = engine.Expected(Text, 64, 0);
                    engine.Pool.Check();
                    return Math.Sqrt(expected.Zip(actual, (e, a) => (a - e) * (a - e)).Average());
                }
            }
        }

        /// <summary>A code of 8 bits is off by up to 1/254 of its row's largest element, one of 4
        /// bits by up to 1/15: averaged over 65 tokens, results are off by far less. An error of 0
        /// would say that the format was not used.</summary>
        [Test]
        public static void QuantisedFormatsStayNearPlainAttention()
        {
            var rotated = new Storage { Options = StorageOptions.Rotate };
            var scaled = new Storage { Scales = new[] { 1f / 448, 1f / 400 } };
            CheckError(1e-5, 2e-3, Error(StorageFormat.Int8Token), "int8");
            CheckError(1e-5, 2e-3, Error(StorageFormat.Q8_0), "q8_0");
            CheckError(1e-5, 1e-2, Error(StorageFormat.Float8E4M3, scaled), "fp8");
            CheckError(1e-4, 2e-2, Error(StorageFormat.Q4_0), "q4_0");
            CheckError(1e-4, 2e-2, Error(StorageFormat.Q4_0, rotated), "q4_0 rotated");
            Check.True(Error(StorageFormat.Q4_0) != Error(StorageFormat.Q4_0, rotated),
                       "rotation makes other codes");
        }

        private static void CheckError(double least, double most, double error, string what)
        {
            Check.True(error > least && error < most, $"{what}: error {error:E2}");
        }

        /// <summary>Short windows and, but for the nearly lossless one, both ends of the model are
        /// spared; nothing else of a layer changes, and the model that is asked does not.</summary>
        [Test]
        public static void PresetsSpareShortWindowsAndTheEnds()
        {
            IsPreset(Preset.NearLossless, StorageFormat.Int8Token, StorageFormat.Int8Token, false);
            IsPreset(Preset.Balanced, StorageFormat.Int8Token, StorageFormat.Int4Token, true);
            IsPreset(Preset.Smallest, StorageFormat.Int4Token, StorageFormat.Int4Token, true);
            var one = new Model(new[] { Engine.NewLayer() });
            Check.Fails(Status.Unsupported, "preset 4", () => one.WithPreset((Preset)4));
            Check.Fails(Status.Invalid, "layer_count",
                        () => new Model(new Layer[0]).WithPreset(Preset.Balanced));
        }

        private static void IsPreset(Preset preset, StorageFormat keys, StorageFormat values,
                                     bool endsSpared)
        {
            Layer[] layers = Enumerable.Range(0, 8).Select(_ => Engine.NewLayer()).ToArray();
            var scaled = new Storage { Scales = new[] { 2f } };
            foreach (Layer layer in layers)
            {
                layer.KeyFormat = layer.ValueFormat = StorageFormat.Default;
            }
            layers[0].KeyFormat = StorageFormat.BFloat16;
            layers[3].Window = 1024;
            layers[4].KeyStorage = scaled;
            layers[7].SharedLayer = 4; // so that 5 and 6 are the last that store
            layers[7].ValueStorage = scaled;
            Model model = new Model(layers).WithPreset(preset);
            for (int i = 0; i < 8; ++i)
            {
                Layer layer = model.Layers[i];
                string what = $"{preset}, layer {i}";
                bool end = i < 2 || i == 5 || i == 6;
                Check.Equal(i == 0 ? StorageFormat.BFloat16 : StorageFormat.Default,
                            layers[i].KeyFormat, what + " as it was");
                Check.Equal(i == 3 ? 1024U : 0U, layer.Window, what);
                if (i == 7)
                {
                    Check.Equal(StorageFormat.Default, layer.KeyFormat, what);
                    Check.True(layer.ValueStorage == scaled && layer.KeyStorage == null, what);
                    Check.Equal(4U, layer.SharedLayer.Value, what);
                }
                else if (i == 3 || (end && endsSpared))
                {
                    Check.Equal(layers[i].KeyFormat, layer.KeyFormat, what);
                    Check.Equal(layers[i].KeyFormat, layer.ValueFormat, what);
                    Check.True(layer.KeyStorage == null && layer.ValueStorage == null, what);
                }
                else
                {
                    Check.Equal(keys, layer.KeyFormat, what);
                    Check.Equal(values, layer.ValueFormat, what);
                    foreach (Storage storage in new[] { layer.KeyStorage, layer.ValueStorage })
                    {
                        Check.Equal(StorageOptions.Rotate, storage.Options, what);
                        Check.True(storage.Scales == null, what);
                    }
                }
            }
            new Pool(new PoolConfig { ArenaBytes = 2 << 20, Threads = 1 }, model).Dispose();
        }

        [Test]
        public static void StaticScalesMustBeGiven()
        {
            Layer layer = Engine.NewLayer();
            layer.KeyFormat = StorageFormat.Float8E4M3;
            layer.ValueFormat = StorageFormat.Float16;
            Refused("needs static scales; say KV_STORAGE_SCALE_ONE", layer);
            foreach (float[] scales in new[] { new float[0], new[] { 1f, 1f, 1f }, new[] { 0f },
                                               new[] { 1f, float.NaN } })
            {
                layer.KeyStorage = new Storage { Scales = scales };
                Refused("scale", layer);
            }
            layer.KeyStorage = new Storage { Options = (StorageOptions)(1u << 31) };
            Check.Fails(Status.Unsupported, "key_storage", () => NewPool(layer).Dispose());
            layer.KeyStorage = new Storage { Options = StorageOptions.ScaleOne };
            NewPool(layer).Dispose();
            layer.KeyStorage = new Storage { Scales = new[] { 0.5f } };
            NewPool(layer).Dispose();
        }

        private static Pool NewPool(Layer layer)
        {
            return new Pool(new PoolConfig { ArenaBytes = 2 << 20, Threads = 1 },
                            new Model(new[] { layer }));
        }

        private static void Refused(string part, Layer layer)
        {
            Check.Fails(Status.Invalid, part, () => NewPool(layer).Dispose());
        }

        /// <summary>With scales 1 and 2 of e4m3, magnitudes beyond 448 and 896 saturate: one
        /// element of keys of head 0, two of values of head 1.</summary>
        [Test]
        public static void SaturatedElementsAreCounted()
        {
            var scaled = new Storage { Scales = new[] { 1f, 2f } };
            using (var engine = new Engine(shape: layer =>
            {
                layer.KeyFormat = StorageFormat.Float8E4M3;
                layer.KeyStorage = layer.ValueStorage = scaled;
            }))
            {
                scaled.Scales[0] = 1000; // the pool has copied them
                float[] keys = new float[Engine.KvHeads * Engine.Dim];
                var values = new float[keys.Length];
                keys[3] = -500;
                keys[Engine.Dim] = 500;
                values[5] = 448;
                values[Engine.Dim] = 1000;
                values[Engine.Dim + 7] = -1000;
                var layout = new TensorLayout(1, Engine.KvHeads, Engine.Dim);
                using (Step step = engine.Pool.BeginStep())
                {
                    step.Append(engine.Pool.CreateSequence(), 1);
                    step.Reserve();
                    step.Write(1, ReadOnlyTensor.Float32(keys, layout),
                               ReadOnlyTensor.Float32(values, layout));
                    CheckScales(step.Export(1, default));
                }
                CheckCounts(engine.Pool.GetLayerStats(0), 0, 0);
                CheckCounts(engine.Pool.GetLayerStats(1), 1, 2);
                Check.Fails(Status.Invalid, "layer 2", () => engine.Pool.GetLayerStats(2));
            }
        }

        private static void CheckCounts(LayerStats stats, ulong keys, ulong values)
        {
            Check.SameElements(new[] { keys, 0UL }, stats.SaturatedKeys, "keys");
            Check.SameElements(new[] { 0UL, values }, stats.SaturatedValues, "values");
        }

        private static void CheckScales(in ExportedTables tables)
        {
            var scales = new float[2];
            Marshal.Copy(tables.KeyScales, scales, 0, 2);
            Check.SameElements(new[] { 1f, 2f }, scales, "scales of keys");
            Check.Equal(StorageFormat.Float8E4M3, tables.ValueFormat, "format");
            Check.Equal(Engine.Dim, tables.KeyWords * tables.KeyWordBytes, "bytes of a row");
        }
    }
}
