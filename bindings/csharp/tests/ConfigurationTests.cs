// Every property of a configuration arrives in the struct that the library takes: each is given a
// value of its own and looked for under its name.
using System;
using System.Linq;
using System.Reflection;
using Kvrt.Native;

namespace Kvrt.Tests
{
    internal static unsafe class ConfigurationTests
    {
        private const BindingFlags Hidden =
            BindingFlags.Instance | BindingFlags.Static | BindingFlags.Public |
            BindingFlags.NonPublic;

        private static Type Internal(string name)
        {
            return typeof(Pool).Assembly.GetType("Kvrt." + name, true);
        }

        /// <summary>Gives every number of an object a value of its own, from `first` on.</summary>
        private static void Fill(object target, int first)
        {
            foreach (PropertyInfo property in target.GetType().GetProperties())
            {
                Type type = Nullable.GetUnderlyingType(property.PropertyType) ??
                            property.PropertyType;
                if (type.IsEnum)
                {
                    property.SetValue(target, Enum.ToObject(type, first++));
                }
                else if (type.IsPrimitive)
                {
                    property.SetValue(target, Convert.ChangeType(first++, type));
                }
            }
        }

        /// <summary>Compares the fields that are numbers with the properties of their names, and
        /// returns how many there were.</summary>
        private static int Compare(object source, object native, string flagsProperty)
        {
            int compared = 0;
            foreach (FieldInfo field in native.GetType().GetFields())
            {
                object value = field.GetValue(native);
                if (field.FieldType.IsPointer || field.Name == "struct_size")
                {
                    continue;
                }
                if (field.Name.StartsWith("reserved", StringComparison.Ordinal) ||
                    field.Name == "flags" && flagsProperty == null)
                {
                    Check.Equal(0L, Convert.ToInt64(value), field.Name);
                    continue;
                }
                string name = field.Name == "flags" ? flagsProperty : Pascal(field.Name);
                PropertyInfo property = source.GetType().GetProperty(name);
                Check.True(property != null, $"no property for {field.Name}");
                Check.Equal(Convert.ToDouble(property.GetValue(source)), Convert.ToDouble(value),
                            field.Name);
                ++compared;
            }
            return compared;
        }

        private static string Pascal(string name)
        {
            return string.Concat(name.Split('_')
                .Select(word => char.ToUpperInvariant(word[0]) + word.Substring(1)));
        }

        /// <summary>Properties that are numbers; switches are flags of the native struct.</summary>
        private static int Numbers(object source)
        {
            return source.GetType().GetProperties().Count(property =>
                (Nullable.GetUnderlyingType(property.PropertyType) ?? property.PropertyType)
                .IsValueType && property.PropertyType != typeof(bool));
        }

        [Test]
        public static void EveryPropertyArrives()
        {
            var config = new PoolConfig();
            var layer = new Layer { Rope = new Rope() };
            Fill(config, 100);
            Fill(layer, 200);
            Fill(layer.Rope, 300);
            layer.SinkLogits = Enumerable.Repeat(1.5f, (int)layer.QueryHeads).ToArray();
            layer.AlibiSlopes = Enumerable.Repeat(2.5f, (int)layer.QueryHeads).ToArray();
            layer.Rope.InverseFrequencies =
                Enumerable.Repeat(3.5, (int)layer.Rope.Dimensions / 2).ToArray();
            layer.KeyStorage = new Storage { Scales = new[] { 4.5f, 5.5f } };
            layer.ValueStorage = new Storage { Options = StorageOptions.Rotate };
            layer.DemotedKeyStorage = new Storage { Scales = new[] { 6.5f } };
            layer.DemotedValueStorage = new Storage { Scales = new[] { 7.5f, 8.5f } };
            var configuration = (IDisposable)Activator.CreateInstance(
                Internal("NativeConfiguration"), config, new Model(new[] { layer, layer }));
            using (configuration)
            {
                CheckModel(layer, (kv_model)Internal("NativeConfiguration").GetProperty("Model")
                                      .GetValue(configuration));
                object native = Internal("NativeConfiguration").GetField("native", Hidden)
                    .GetValue(configuration);
                Check.Equal((uint)sizeof(kv_pool_config), ((kv_pool_config)native).struct_size,
                            "struct_size of kv_pool_config");
                Check.Equal(Numbers(config), Compare(config, native, "Options"), "numbers");
            }
        }

        private static void CheckModel(Layer layer, kv_model model)
        {
            Check.Equal((uint)sizeof(kv_model), model.struct_size, "struct_size of kv_model");
            Check.Equal(2u, model.layer_count, "layers");
            for (int i = 0; i < 2; ++i)
            {
                kv_layer native = model.layers[i];
                Check.Equal((uint)sizeof(kv_layer), native.struct_size, "struct_size of kv_layer");
                Check.Equal(
                    NativeConstants.KV_LAYER_SHARED | NativeConstants.KV_LAYER_LANE_PER_HEAD |
                        NativeConstants.KV_LAYER_CACHE_POSITIONS,
                    native.flags, "flags of kv_layer");
                native.flags = 0;
                Check.Equal(Numbers(layer), Compare(layer, native, null), "numbers of kv_layer");
                Check.Equal(1.5f, native.sink_logits[layer.QueryHeads - 1], "sink_logits");
                Check.Equal(2.5f, native.alibi_slopes[layer.QueryHeads - 1], "alibi_slopes");
                kv_rope rope = *native.rope;
                Check.Equal((uint)sizeof(kv_rope), rope.struct_size, "struct_size of kv_rope");
                Check.Equal(Numbers(layer.Rope), Compare(layer.Rope, rope, null), "of kv_rope");
                kv_storage keys = *native.key_storage, values = *native.value_storage;
                Check.Equal((uint)sizeof(kv_storage), keys.struct_size, "size of kv_storage");
                Check.Equal((uint)sizeof(kv_storage), values.struct_size, "size of kv_storage");
                Check.Equal(0u, keys.flags, "flags of keys");
                Check.Equal(NativeConstants.KV_STORAGE_ROTATE, values.flags, "flags of values");
                Check.Equal(2u, keys.scale_count, "scales of keys");
                Check.Equal(5.5f, keys.scales[1], "last scale of keys");
                Check.Equal(0u, values.scale_count, "scales of values");
                Check.True(values.scales == null, "pointer to scales of values");
                keys = *native.demoted_key_storage;
                values = *native.demoted_value_storage;
                Check.Equal(1u, keys.scale_count, "scales of demoted keys");
                Check.Equal(6.5f, keys.scales[0], "scale of demoted keys");
                Check.Equal(2u, values.scale_count, "scales of demoted values");
                Check.Equal(8.5f, values.scales[1], "last scale of demoted values");
                Check.Equal(3.5, rope.inverse_frequencies[rope.dimensions / 2 - 1], "frequencies");
            }
        }

        [Test]
        public static void EveryPropertyOfAPolicyArrives()
        {
            var policy = new Policy();
            Fill(policy, 400);
            var native = (kv_policy)Internal("NativePolicy").GetMethod("Describe", Hidden)
                .Invoke(null, new object[] { policy });
            Check.Equal((uint)sizeof(kv_policy), native.struct_size, "struct_size");
            Check.Equal(Numbers(policy), Compare(policy, native, "Options"), "numbers");
        }

        [Test]
        public static void ALayerThatStoresHasNoFlag()
        {
            using (var configuration = (IDisposable)Activator.CreateInstance(
                Internal("NativeConfiguration"), new PoolConfig(),
                new Model(new[] { Engine.NewLayer() })))
            {
                var model = (kv_model)Internal("NativeConfiguration").GetProperty("Model")
                    .GetValue(configuration);
                Check.Equal(0u, model.layers[0].flags, "flags");
                Check.True(model.layers[0].rope == null && model.layers[0].sink_logits == null &&
                           model.layers[0].alibi_slopes == null &&
                           model.layers[0].key_storage == null &&
                           model.layers[0].value_storage == null &&
                           model.layers[0].demoted_key_storage == null &&
                           model.layers[0].demoted_value_storage == null, "pointers");
            }
        }
    }
}
