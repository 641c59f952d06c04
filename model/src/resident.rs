//! One layer of a chunk in the device's memory, as it is stored: what prompts ask for again and again need not come over the
//! bus each time. On the CPU it is a copy beside the host's.

use kvsplice_kernels::place::{Piece, Resident};
use kvsplice_kernels::quantize::Shape;
use kvsplice_kv::KvLayout;
use tch::Device;

use crate::Error;
use crate::stored::{Scales, StoredLayer, encoding};

/// One layer of a chunk on a device. Clones share its memory.
#[derive(Clone, Debug)]
pub struct ResidentLayer {
    tokens: u32,
    bytes: u64,
    layer: Resident,
}

/// One layer of a chunk, wherever it is.
#[derive(Clone, Debug)]
pub enum LayerKv {
    /// In host memory.
    Host(StoredLayer),
    /// On the device that computes.
    Device(ResidentLayer),
}

impl StoredLayer {
    /// Bytes that the layer takes on a device.
    pub fn device_bytes(&self) -> u64 {
        let KvLayout { kv_heads, head_dim, .. } = self.layout;
        let shape = Shape { tokens: self.tokens as usize, kv_heads: kv_heads as usize, head_dim: head_dim as usize };
        Resident::bytes(encoding(self.layout.encoding), shape) as u64
    }

    /// A copy on `device`; on a GPU what computes next finds it, and nobody waits. Fails when the bytes do not fit the
    /// layout, on a scale that no encoder writes, and when the device has no memory left.
    pub fn to_device(&self, device: Device) -> Result<ResidentLayer, Error> {
        let KvLayout { kv_heads, head_dim, .. } = self.layout;
        let scales = self.scales()?;
        let layer = Resident::new(&self.rows(0, &scales)?, kv_heads as usize, head_dim as usize, device)?;
        Ok(ResidentLayer { tokens: self.tokens, bytes: self.device_bytes(), layer })
    }
}

impl ResidentLayer {
    /// Bytes that it takes on its device.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl LayerKv {
    /// Scales that host memory holds unaligned; those of a device were made ready when it got them.
    pub(crate) fn scales(&self) -> Result<Scales, Error> {
        match self {
            LayerKv::Host(stored) => stored.scales(),
            LayerKv::Device(_) => Ok(Scales::default()),
        }
    }

    /// Rows from `first` on, with the scales that [`LayerKv::scales`] gave.
    pub(crate) fn rows<'a>(&'a self, first: u32, scales: &'a Scales) -> Result<Piece<'a>, Error> {
        match self {
            LayerKv::Host(stored) => Ok(Piece::Host(stored.rows(first, scales)?)),
            LayerKv::Device(ResidentLayer { tokens, layer, .. }) if first <= *tokens => {
                Ok(Piece::Resident { layer, rows: first as usize..*tokens as usize })
            }
            LayerKv::Device(ResidentLayer { tokens, .. }) => {
                Err(Error::Argument(format!("token {first} of a chunk of {tokens}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kvsplice_kernels::rope::RopeTable;
    use kvsplice_kv::{Encoding, Part};
    use tch::{Kind, Tensor};

    use super::*;
    use crate::Config;
    use crate::cache::KvCache;

    const TOKENS: u32 = 130;

    fn stored(encoding: Encoding) -> StoredLayer {
        let layout = KvLayout { layers: 1, kv_heads: 2, head_dim: 16, encoding };
        let random = |seed| {
            tch::manual_seed(seed);
            Tensor::randn([i64::from(TOKENS), 2, 16], (Kind::Float, Device::Cpu))
        };
        StoredLayer::encode(layout, &random(1), &random(2)).unwrap()
    }

    /// Every key and value of a cache in which the layers' rows are placed.
    fn placed(kind: Kind, layers: &[(&LayerKv, u32)], rows: u32) -> Result<Tensor, Error> {
        let config = Config { layers: 1, kv_heads: 2, head_dim: 16, ..Config::tiny(64) };
        let mut cache = KvCache::new(&config, 5 * TOKENS, kind, Device::Cpu)?;
        let slots: Vec<u32> = (0..rows).map(|row| row + row / 9).collect();
        let rotation = RopeTable::new(&[0.5; 8], 5 * TOKENS)?.at(&slots)?;
        cache.place(0, &slots, layers, &rotation)?;
        let (keys, values) = cache.layer(0);
        Ok(Tensor::stack(&[keys, values], 0))
    }

    #[test]
    fn a_cache_is_the_same_whether_layers_lie_on_the_host_or_on_the_device() {
        for encoding in Encoding::ALL {
            let host = LayerKv::Host(stored(encoding));
            let LayerKv::Host(layer) = &host else { panic!("it is on the host") };
            let device = layer.to_device(Device::Cpu).unwrap();
            assert!(device.bytes() == layer.device_bytes() && device.bytes() >= layer.bytes.len() as u64);
            let device = LayerKv::Device(device);
            for (kind, first) in
                [(Kind::Float, 0), (Kind::BFloat16, 70), (Kind::Float, TOKENS - 1), (Kind::Float, TOKENS)]
            {
                let rows = 2 * TOKENS - first;
                let expected = placed(kind, &[(&host, first), (&host, 0)], rows).unwrap();
                assert!(expected.abs().sum(Kind::Float).double_value(&[]) > 1.0);
                for layers in [[(&device, first), (&host, 0)], [(&host, first), (&device, 0)]] {
                    assert!(placed(kind, &layers, rows).unwrap().equal(&expected), "{encoding} from {first}");
                }
            }
            assert!(placed(Kind::Float, &[(&device, TOKENS + 1)], 0).is_err());
        }
    }

    #[test]
    fn bytes_that_do_not_fit_and_bad_scales_do_not_get_there() {
        let good = stored(Encoding::Int8);
        assert!(StoredLayer { tokens: TOKENS + 1, ..good.clone() }.to_device(Device::Cpu).is_err());
        let mut bytes = good.bytes.to_vec();
        let scale = good.layout.part_range(Part::ValueScales, TOKENS).start;
        bytes[scale..scale + 4].copy_from_slice(&(-1f32).to_le_bytes());
        let bad = StoredLayer { bytes: Bytes::from(bytes), ..good };
        assert!(bad.to_device(Device::Cpu).unwrap_err().to_string().contains("scale 0 is -1"));
    }
}
